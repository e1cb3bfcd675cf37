#include "fuzz/targets.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "container/common/open.h"
#include "container/dcp/dcp.h"
#include "container/manifest/tiling.h"
#include "container/pickled/globals.h"
#include "container/pickled/item.h"
#include "container/safetensors/safetensors.h"
#include "container/zip/zip.h"
#include "dialect/common/dialect.h"
#include "io/read/open.h"
#include "pickle/plain.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {
namespace {

constexpr const char* kWhat = "fuzz";
constexpr PickleLimits kLimits{.bytes = 1u << 20, .nodes = 1u << 16, .stack = 1u << 16};

/// A promise of ours that an input broke: the fuzzer shall stop here.
void demand(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

Result<Pickle> plain_pickle(std::string_view input) {
  static const Allowlist plain{plain_globals(), true};
  return read_pickle(std::string(input), plain, kWhat, kLimits);
}

/// The machine, the stack, and what values unfold to.
bool pickle(std::string_view input) {
  const auto read = plain_pickle(input);
  if (read.ok()) static_cast<void>(plain_value(read.value(), read.value().root, kWhat));
  return read.ok();
}

/// Plain values, and back.
bool value(std::string_view input) {
  const auto read = plain_pickle(input);
  if (!read.ok()) return false;
  const auto first = plain_value(read.value(), read.value().root, kWhat);
  if (!first.ok()) return false;
  PickleWriter writer(2);
  write_value(writer, first.value());
  const std::string bytes = writer.finish();
  const auto again = plain_pickle(bytes);
  if (!again.ok() && bytes.size() > kLimits.bytes / 2) return true;  // shared parts were unfolded
  demand(again.ok(), "a value that was written is read");
  const auto second = plain_value(again.value(), again.value().root, kWhat);
  demand(second.ok(), "a value that was written is plain");
  PickleWriter rewriter(2);
  write_value(rewriter, second.value());
  demand(rewriter.finish() == bytes, "a value comes back as it was");  // bytes: NaN is not NaN
  return true;
}

bool zip(std::string_view input) {
  const auto file = File::of_bytes(input, kWhat);
  if (!file.ok()) return false;
  const auto index = read_zip(*file.value(), 0, input.size(), kWhat);
  if (!index.ok()) return false;
  uint64_t end = 0;
  for (const ZipRecord& record : index.value().records) {
    demand(record.offset >= end && record.offset <= input.size() &&
               record.size <= input.size() - record.offset,
           "records lie in the file, one behind the other");
    end = record.offset + record.size;
    static_cast<void>(check_crc(*file.value(), index.value(), record, kWhat));
  }
  return true;
}

/// `.metadata` to a manifest, whether its boxes tile their tensors, and back.
bool metadata(std::string_view input) {
  const auto manifest = parse_metadata(std::string(input), kWhat);
  if (!manifest.ok()) return false;
  for (const Tensor& t : manifest.value().tensors) {
    if (!check_tiling(t).ok()) return false;
  }
  const auto again = parse_metadata(metadata_bytes(manifest.value(), kWhat), kWhat);
  demand(again.ok(), "metadata that was written is read");
  demand(again.value().tensors.size() == manifest.value().tensors.size() &&
             again.value().blobs.size() == manifest.value().blobs.size(),
         "metadata comes back with its leaves");
  return true;
}

/// Two ranks' metadata, joined.
bool join_ranks(std::string_view input) {
  if (input.size() < 2) return false;
  const size_t cut = static_cast<uint8_t>(input[0]) | static_cast<uint8_t>(input[1]) << 8;
  const std::string_view body = input.substr(2);
  if (cut > body.size()) return false;
  auto all = parse_metadata(std::string(body.substr(0, cut)), kWhat);
  auto part = parse_metadata(std::string(body.substr(cut)), kWhat);
  if (!all.ok() || !part.ok()) return false;
  if (!join(all.value(), std::move(part.value()), kWhat).ok()) return false;
  for (const Tensor& t : all.value().tensors) {
    if (!check_tiling(t).ok()) return false;
  }
  return true;
}

/// One item of a DCP directory, with a tensor, plain or a subclass.
bool tensor_item(std::string_view input) {
  const auto file = File::of_bytes(input, kWhat);
  if (!file.ok()) return false;
  return read_stored(*file.value(), {0, 0, 0, input.size()}, kWhat).ok();
}

/// One item of a DCP directory, without a tensor.
bool value_item(std::string_view input) {
  const auto file = File::of_bytes(input, kWhat);
  if (!file.ok()) return false;
  return read_value(*file.value(), {0, 0, 0, input.size()}, kWhat).ok();
}

/// A file with a name that holds the input: readers of whole files open them by name.
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

const NamedFile& named(std::string_view input) {
  static const NamedFile file;
  demand(file.hold(input), "the input is written to a file of its own");
  return file;
}

/// Reads what a leaf has, all of it where it is small.
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

bool document_at(std::string_view input, Result<Manifest> (*reader)(const std::string&)) {
  auto manifest = reader(named(input).path());
  if (!manifest.ok()) return false;
  const auto document = document_of(std::make_shared<const Manifest>(std::move(manifest.value())));
  if (!document.ok()) return false;
  bool all = true;
  for (const Leaf& leaf : document.value().leaves) all = pull(leaf) && all;
  return document.value().finish().ok() && all;
}

bool torch_file(std::string_view input) {
  return document_at(input, [](const std::string& path) { return read_torch_zip(path); });
}
bool legacy(std::string_view input) { return document_at(input, read_torch_legacy); }
bool safetensors(std::string_view input) { return document_at(input, read_safetensors); }

/// The header alone, and back. The bytes behind it are as many as it asks for.
bool header(std::string_view input) {
  for (const uint64_t room : {uint64_t{0}, uint64_t{24}, uint64_t{1} << 20}) {
    const auto read = parse_safetensors(input, room, kWhat);
    if (!read.ok()) continue;
    const std::string text = safetensors_header(read.value().entries, read.value().metadata);
    const auto again = parse_safetensors(text, room, kWhat);
    demand(again.ok() && again.value().entries.size() == read.value().entries.size(),
           "a header that was written is read");
    return true;
  }
  return false;
}

/// What we keep in a header's `__metadata__`, and back.
bool convention(std::string_view input) {
  const auto read = parse_description(input, kWhat);
  if (!read.ok()) return false;
  const std::string text = describe(read.value());
  const auto again = parse_description(text, kWhat);
  demand(again.ok(), "a description that was written is read");
  demand(describe(again.value()) == text, "a description comes back as it was");
  return true;
}

/// A file of whatever kind, whose optimizer state is it, and what it means.
bool dialect(std::string_view input) {
  auto opened = open_checkpoint(named(input).path());
  if (!opened.ok()) return false;
  const auto document = std::make_shared<const Document>(std::move(opened.value()));
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

constexpr FuzzTarget kTargets[] = {
    {"pickle", "pickle", pickle},
    {"value", "pickle", value},
    {"zip", "zip", zip},
    {"metadata", "pickle", metadata},
    {"join", "pickle", join_ranks},
    {"tensor_item", "zip", tensor_item},
    {"value_item", "zip", value_item},
    {"torch", "zip", torch_file},
    {"legacy", "pickle", legacy},
    {"safetensors", "json", safetensors},
    {"header", "json", header},
    {"convention", "json", convention},
    {"dialect", "zip", dialect},
};

}  // namespace

std::span<const FuzzTarget> fuzz_targets() { return kTargets; }

const FuzzTarget* find_fuzz_target(std::string_view name) {
  for (const FuzzTarget& target : kTargets) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

}  // namespace lowbit::ckpt
