#include "io/write/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>

#include "io/text.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndex = ".metadata";
constexpr const char* kDigests = "lowbit.json";
constexpr const char* kOwner = ".owner";  // of a save from Python that was killed in its last step

/// The digits that `text` begins with are cut off it.
std::optional<uint64_t> cut_number(std::string_view& text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number > 1u << 30) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

bool cut_off(std::string_view& text, std::string_view begin) {
  if (!text.starts_with(begin)) return false;
  text.remove_prefix(begin.size());
  return true;
}

/// The N of __RANK_N.distcp.
std::optional<uint64_t> data_number(std::string_view name) {
  if (!cut_off(name, "__") || !cut_number(name) || !cut_off(name, "_")) return std::nullopt;
  const auto number = cut_number(name);
  return name == ".distcp" ? number : std::nullopt;
}

/// __RANK.metadata of torch without collectives, and what a killed save leaves of an index.
bool is_rank_index(std::string_view name) {
  if (name == ".metadata.tmp") return true;
  return cut_off(name, "__") && cut_number(name) &&
         (name == ".metadata" || name == ".metadata.tmp");
}

/// DeepSpeed's files beside zero/: mp_rank_00_model_states.pt, and of stage 3 one for each rank.
bool is_model_states(std::string_view name) {
  if (cut_off(name, "zero_pp_rank_") && (!cut_number(name) || !cut_off(name, "_"))) return false;
  return cut_off(name, "mp_rank_") && cut_number(name) && name == "_model_states.pt";
}

bool is_folder(const fs::directory_entry& entry) {
  std::error_code error;
  return entry.symlink_status(error).type() == fs::file_type::directory;
}

/// What is not its own in zero/ of a Universal Checkpoint, which has NAME/STATE.pt and files.
std::vector<std::string> others_in_zero(const fs::path& zero, std::error_code& error) {
  std::vector<std::string> out;
  fs::recursive_directory_iterator entries(zero, error);
  for (; !error && entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    const bool folder = is_folder(*entries);
    if (folder ? entries.depth() == 0 : entries->path().extension() == ".pt") continue;
    out.push_back("zero/" + entries->path().lexically_relative(zero).string() +
                  (folder ? "/" : ""));
    if (folder) entries.disable_recursion_pending();
  }
  return out;
}

bool is_there(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0;
}

/// Entries of a folder, by name. None where it cannot be listed.
std::vector<fs::directory_entry> entries_of(const std::string& path) {
  std::error_code error;
  std::vector<fs::directory_entry> out;
  fs::directory_iterator entries(path, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    out.push_back(*entries);
  std::ranges::sort(out);
  return out;
}

/// Keeps two that publish into one folder apart, where the file system has locks.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    while (fd_ >= 0 && ::flock(fd_, LOCK_EX) != 0 && errno == EINTR) continue;
  }
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

}  // namespace

bool lacks_call(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

int rename_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return 0;
  if (!lacks_call(errno)) return -1;
  if (is_there(to)) {  // a file system without that flag (NFS, some FUSE)
    errno = EEXIST;
    return -1;
  }
  return ::rename(from.c_str(), to.c_str());
}

bool is_dcp_file(std::string_view name) {
  return data_number(name) || is_rank_index(name) || name == kIndex || name == kDigests ||
         name == kOwner;
}

std::string FolderContent::names() const {
  constexpr size_t kShown = 3;
  const size_t shown = others.size() > kShown + 1 ? kShown : others.size();
  std::string out;
  for (size_t i = 0; i < shown; ++i) {
    if (i > 0) out += i + 1 == others.size() ? " and " : ", ";
    out += printable(others[i]);
  }
  if (shown < others.size()) out += " and " + std::to_string(others.size() - shown) + " others";
  return out;
}

Result<FolderContent> folder_content(const std::string& path) {
  FolderContent out;
  const auto unlisted = [&](const std::error_code& error) {
    return failed("cannot list " + printable(path) + ": " + error.message());
  };
  std::error_code error;
  std::vector<std::string> of_deepspeed;
  fs::directory_iterator entries(path, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename();
    if (is_folder(*entries)) {
      if (name == "zero" && is_there(path + "/zero/optimizer_state.pt")) {
        out.universal = true;
        std::error_code inner;
        const auto found = others_in_zero(entries->path(), inner);
        if (inner) return unlisted(inner);
        out.others.insert(out.others.end(), found.begin(), found.end());
      } else {
        out.others.push_back(name + "/");
      }
    } else if (const auto number = data_number(name)) {
      out.data = true;
      out.next_number = std::max(out.next_number, *number + 1);
    } else if (name == kIndex || is_rank_index(name)) {
      out.dcp = true;
    } else if (is_model_states(name)) {
      of_deepspeed.push_back(name);
    } else if (name != kDigests && name != kOwner) {
      out.others.push_back(name);
    }
  }
  if (error) return unlisted(error);
  if (!out.universal) out.others.insert(out.others.end(), of_deepspeed.begin(), of_deepspeed.end());
  std::ranges::sort(out.others);
  return out;
}

std::vector<PublicationStep> publication(const std::vector<std::string>& there,
                                         const std::set<std::string>& data, bool digests) {
  using enum PublicationStep::Kind;
  const auto has = [&](const char* name) { return std::ranges::find(there, name) != there.end(); };
  const bool replaces = has(kIndex) || std::ranges::any_of(there, is_rank_index);
  std::vector<PublicationStep> steps;
  // Digests of another checkpoint would call this one damaged: without them it loads.
  if (has(kDigests) && (replaces || !digests)) steps.push_back({kRemove, kDigests});
  if (digests && !replaces) steps.push_back({kPut, kDigests});
  steps.push_back({kPut, kIndex});
  if (digests && replaces) steps.push_back({kPut, kDigests});
  for (const std::string& name : there) {
    if ((data_number(name) && !data.contains(name)) || is_rank_index(name))
      steps.push_back({kRemove, name});
  }
  return steps;
}

Status publish_into(const std::string& from, const std::string& to, bool sync) {
  const FolderLock lock(to);
  const auto moved_not = [&](const std::string& name) {
    const std::string why =
        errno == EEXIST ? "another program created it during the write" : reason();
    return failed("cannot move " + printable(name) + " into " + printable(to) + ": " + why);
  };
  const auto synced = [&] { return sync ? sync_folder(to) : fine(); };
  struct stat info;
  for (const char* name : {kIndex, kDigests}) {
    if (::lstat((to + "/" + name).c_str(), &info) == 0 && S_ISDIR(info.st_mode))
      return failed(printable(to + "/" + name) + " is a folder, and in the way: remove it");
  }
  std::set<std::string> data;
  const auto back = [&](const Error& error) {
    for (const std::string& name : data)
      ::rename((to + "/" + name).c_str(), (from + "/" + name).c_str());
    return error;
  };
  for (const auto& entry : entries_of(from)) {
    const std::string name = entry.path().filename();
    if (!data_number(name)) continue;
    if (rename_new(from + "/" + name, to + "/" + name) != 0) return back(moved_not(name));
    data.insert(name);
  }
  if (const Status done = synced(); !done.ok()) return back(done.error());
  std::vector<std::string> there;
  for (const auto& entry : entries_of(to)) there.push_back(entry.path().filename());
  bool visible =
      false;  // from the new index on there is no way back, and what is left over may stay
  for (const auto& [kind, name] : publication(there, data, is_there(from + "/" + kDigests))) {
    if (kind == PublicationStep::kRemove) {
      const bool gone = ::unlink((to + "/" + name).c_str()) == 0;
      if (visible || !gone) continue;
    } else if (::rename((from + "/" + name).c_str(), (to + "/" + name).c_str()) != 0) {
      return visible ? moved_not(name) : back(moved_not(name));
    }
    if (name == kIndex) visible = true;
    if (const Status done = synced(); !done.ok())
      return visible ? done.error() : back(done.error());
  }
  std::error_code ignored;
  fs::remove_all(from, ignored);
  return fine();
}

void remove_replaced(const std::string& from, const std::string& to) {
  // First of all, so that what a kill leaves of it is never taken for a whole one.
  ::unlink((from + "/" + kIndex).c_str());
  const auto found = folder_content(from);
  if (!found.ok()) return;
  std::error_code ignored;
  for (const std::string& other : found.value().others) {
    const std::string name = other.ends_with('/') ? other.substr(0, other.size() - 1) : other;
    if (name.starts_with("zero/") || rename_new(from + "/" + name, to + "/" + name) != 0) return;
  }
  fs::remove_all(from, ignored);
}

}  // namespace lowbit::ckpt
