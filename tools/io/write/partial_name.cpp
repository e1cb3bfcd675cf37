#include "io/write/partial_name.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "io/hash.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kUnique = "XXXXXX";  // what mkstemp and mkdtemp fill in
static_assert(kSaving.size() == kUnique.size() && kPieces.size() == kUnique.size() &&
              kRemoved.size() == kUnique.size());

}  // namespace

std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

Status sync_folder(const std::string& given) {
  const std::string path = given.empty() ? "." : given;
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return failed("cannot open " + printable(path) + ": " + std::strerror(errno));
  const bool done = ::fsync(fd) == 0;
  const int why = errno;
  ::close(fd);
  return done ? fine()
              : Status(failed("cannot sync " + printable(path) + ": " + std::strerror(why)));
}

std::string partial_stem(const std::string& name) {
  constexpr size_t kMax = 255 - 1 - kPartial.size() - kUnique.size() - 4;  // ".old" may follow
  if (name.size() <= kMax) return "." + name + std::string(kPartial);
  // A beginning that ends between two characters, and what tells it from others that begin so.
  size_t keep = kMax - 17;
  while (keep > 0 && (static_cast<unsigned char>(name[keep]) & 0xc0) == 0x80) --keep;
  Hash hash;
  hash.add(name.data(), name.size());
  return "." + name.substr(0, keep) + "~" + hash.hex().substr(0, 16) + std::string(kPartial);
}

std::string partial_name(const std::string& name) {
  return partial_stem(name) + std::string(kUnique);
}

bool is_partial(const std::string& path) {
  const size_t end = path.find_last_not_of('/') + 1;
  const std::string whole = path.substr(0, end);
  const std::string name = whole.substr(whole.find_last_of('/') + 1);
  const size_t mark = name.rfind(kPartial);
  return name.starts_with('.') && mark != std::string::npos &&
         name.size() == mark + kPartial.size() + kUnique.size();
}

std::vector<std::string> leftovers_of(const std::string& given) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::string parent = parent_of(path);
  const std::string begin = partial_stem(path.substr(parent.size()));
  std::vector<std::string> out;
  std::error_code error;
  std::filesystem::directory_iterator entries(parent.empty() ? "." : parent, error);
  for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename();
    if (name.starts_with(begin) && (is_partial(name) || name.ends_with(".old")))
      out.push_back(parent + name);
  }
  std::ranges::sort(out);
  return out;
}

unsigned mode_of(const std::vector<std::string>& sources) {
  unsigned mode = 0777;
  struct stat info;
  for (const std::string& source : sources) {
    for (const char* part : {"", "/.metadata"}) {
      if (::stat((source + part).c_str(), &info) != 0) continue;
      // Who may read a file may also look into a folder.
      const unsigned readers = info.st_mode & 0444;
      mode &= 0700u | readers | readers >> 1 | readers >> 2;
    }
  }
  return mode;
}

unsigned mask_of_process() {
  // Linux shows it; to ask the system is to change it for a moment, for every thread.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    unsigned mask = 0;
    if (std::sscanf(line.c_str(), "Umask: %o", &mask) == 1) return mask;
  }
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return mask;
}

std::string final_path(const std::string& path) {
  for (size_t mark = path.rfind(kPartial); mark != std::string::npos && mark > 0;
       mark = path.rfind(kPartial, mark - 1)) {
    const size_t end = mark + kPartial.size() + kUnique.size();
    const std::string temporary = path.substr(0, end);
    if (!is_partial(temporary) || (end < path.size() && path[end] != '/')) continue;
    const std::string parent = parent_of(temporary);
    const size_t name = parent.size() + 1;  // behind the dot
    return parent + path.substr(name, mark - name) + path.substr(end);
  }
  return path;
}

Error unwritten(const std::string& path) {
  const int why = errno;
  std::string shown = final_path(path), left = "nothing was left behind";
  if (const size_t end = path.rfind(std::string(kPartial) + std::string(kPieces) + "/");
      end != std::string::npos) {
    left = "what other parts wrote lies in " +
           printable(path.substr(0, path.find('/', end)));  // of a reshard by several processes
    if (shown.size() > 7 && shown[shown.size() - 7] == '.') shown.resize(shown.size() - 7);
  }
  const std::string name = printable(shown);
  if (why == ENOSPC || why == EDQUOT)
    return failed("the disk is full while " + name + " is written; " + left);
  if (why == EFBIG)
    return failed(name + " grows beyond the largest file that is allowed here; " + left);
  return failed(name + ": cannot write: " + std::strerror(why));
}

}  // namespace lowbit::ckpt
