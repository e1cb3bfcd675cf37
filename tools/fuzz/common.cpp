#include "fuzz/common.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {
namespace {

class NamedFile {
 public:
  NamedFile() {
    std::error_code none;
    const char* memory = "/dev/shm";
    path_ = std::filesystem::is_directory(memory, none)
                ? std::string(memory)
                : std::filesystem::temp_directory_path(none).string();
    path_ += "/lowbit-fuzz-XXXXXX";
    fd_ = ::mkstemp(path_.data());
  }
  ~NamedFile() {
    if (fd_ < 0) return;
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  NamedFile(const NamedFile&) = delete;
  NamedFile& operator=(const NamedFile&) = delete;
  bool hold(std::string_view bytes) const {
    return fd_ >= 0 && ::ftruncate(fd_, 0) == 0 &&
           ::pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_;
};

bool pull(const Leaf& leaf) {
  bool all = true;
  for (const Leaf& part : leaf.parts) all = pull(part) && all;
  if (leaf.source == nullptr) return all;
  const uint64_t limit = std::min<uint64_t>(volume(leaf.shape), 1u << 16);
  return for_elements(leaf, 0, limit, 1u << 14,
                      [](const char*, uint64_t, uint64_t) { return fine(); })
             .ok() &&
         all;
}

}  // namespace

void demand(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

const std::string& named(std::string_view input) {
  static const NamedFile file;
  demand(file.hold(input), "the input is written to a file of its own");
  return file.path();
}

bool pull(const Document& document) {
  bool all = true;
  for (const Leaf& leaf : document.leaves) all = pull(leaf) && all;
  return document.finish().ok() && all;
}

bool understand(Document opened) {
  const auto document = std::make_shared<const Document>(std::move(opened));
  const auto known = recognize(*document);
  if (!known.ok()) return false;
  auto model = known.value().dialect->read(document, known.value().tree);
  if (!model.ok()) return false;
  std::vector<float> numbers(1u << 12);
  bool all = true;
  for (Param& param : model.value().params) {
    for (State& state : param.states) {
      if (state.values == nullptr) continue;
      const uint64_t count = std::min<uint64_t>(volume(state.shape), numbers.size());
      all = state.values->read(0, count, numbers.data()).ok() && all;
    }
  }
  for (const Dialect* to : dialects()) {
    DialectReport report;
    if (to->write != nullptr) static_cast<void>(to->write(model.value(), {}, report));
  }
  return all;
}

}  // namespace lowbit::ckpt
