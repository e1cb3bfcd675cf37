#include "fuzz/entries.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "io/read/store.h"

namespace lowbit::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = "\n@@ ", kLink = " -> ";
constexpr const char* kUrl = "fuzz://store/run";

/// What stands before and behind the arrow of a link; all of a name, and nothing, where there is
/// none.
std::pair<std::string, std::string> link_of(const std::string& name) {
  const size_t at = name.find(kLink);
  if (at == std::string::npos) return {name, ""};
  return {name.substr(0, at), name.substr(at + kLink.size())};
}

/// Whether a file of that name lies in the folder.
bool is_inner(const std::string& name) {
  const fs::path path = name;
  if (name.empty() || path.is_absolute() || name.find('\0') != std::string::npos) return false;
  return std::ranges::all_of(
      path, [](const fs::path& part) { return part != ".." && part.native().size() < 200; });
}

class MemoryStore : public StoreLocation {
 public:
  MemoryStore(const std::vector<FolderEntry>& all, std::string prefix)
      : all_(all), prefix_(std::move(prefix)) {}

  Result<StoreEntry> info(const std::string& name) override {
    const std::string full = below(name);
    StoreEntry out;
    out.name = name;
    for (const FolderEntry& entry : all_) {
      const auto [path, size] = link_of(entry.name);
      if (path == full && !path.ends_with('/')) return told(entry, name);
      if (full.empty() || path.starts_with(full + "/")) out.kind = PathKind::kFolder;
    }
    return out;
  }
  Result<std::vector<StoreEntry>> list() override {
    std::vector<StoreEntry> out;
    for (const FolderEntry& entry : all_) {
      std::string path = link_of(entry.name).first;
      if (!prefix_.empty()) {
        if (!path.starts_with(prefix_ + "/")) continue;
        path.erase(0, prefix_.size() + 1);
      }
      const size_t slash = path.find('/');
      if (slash == std::string::npos || slash == 0) {
        out.push_back(told(entry, path));
      } else {
        out.push_back({path.substr(0, slash), PathKind::kFolder, 0, ""});
      }
    }
    return out;
  }
  Result<std::string> read(const std::string& name, uint64_t begin, uint64_t end) override {
    const std::string full = below(name);
    for (const FolderEntry& entry : all_) {
      if (link_of(entry.name).first != full) continue;
      const uint64_t size = entry.data.size();
      return entry.data.substr(std::min(begin, size), std::min(end, size) - std::min(begin, size));
    }
    return bad(full + ": is not there");
  }

 private:
  std::string below(const std::string& name) const {
    return prefix_.empty() || name.empty() ? prefix_ + name : prefix_ + "/" + name;
  }
  static StoreEntry told(const FolderEntry& entry, const std::string& name) {
    const std::string size = link_of(entry.name).second;
    const uint64_t said = size.empty() ? 0 : std::strtoull(size.c_str(), nullptr, 10);
    return {name, PathKind::kFile, size.empty() ? entry.data.size() : said, "v"};
  }
  const std::vector<FolderEntry>& all_;
  std::string prefix_;
};

}  // namespace

std::vector<FolderEntry> entries_of(std::string_view input) {
  std::vector<FolderEntry> out;
  for (size_t at = input.find(kMark); at != std::string_view::npos;) {
    at += kMark.size();
    const size_t next = input.find(kMark, at);
    const std::string_view all = input.substr(at, next == input.npos ? next : next - at);
    const size_t line = std::min(all.find('\n'), all.size());
    out.push_back({std::string(all.substr(0, line)),
                   std::string(all.substr(std::min(line + 1, all.size())))});
    at = next;
  }
  return out;
}

std::string text_of(const std::vector<FolderEntry>& entries) {
  std::string out;
  for (const FolderEntry& entry : entries)
    out.append(kMark).append(entry.name).append("\n").append(entry.data);
  return out;
}

FolderOnDisk::FolderOnDisk() {
  std::error_code none;
  const bool memory = fs::is_directory("/dev/shm", none);
  path_ = (memory ? "/dev/shm" : fs::temp_directory_path(none).string()) + "/lowbit-fuzz-XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) std::abort();
}

FolderOnDisk::~FolderOnDisk() {
  std::error_code none;
  fs::remove_all(path_, none);
}

const std::string& FolderOnDisk::hold(const std::vector<FolderEntry>& entries) const {
  std::error_code none;
  for (const auto& old : fs::directory_iterator(path_, none)) fs::remove_all(old.path(), none);
  for (const FolderEntry& entry : entries) {
    const auto [name, target] = link_of(entry.name);
    if (!is_inner(name)) continue;
    const fs::path path = fs::path(path_) / name;
    // Never through a link that an entry before made.
    const fs::path folder = path.parent_path();
    const fs::path real = fs::weakly_canonical(folder, none);
    if (none || !real.native().starts_with(path_)) continue;
    fs::create_directories(folder, none);
    if (name.ends_with('/')) continue;
    if (!target.empty()) {
      fs::create_symlink(target, path, none);
    } else if (!fs::is_symlink(path, none)) {
      std::ofstream(path, std::ios::binary) << entry.data;
    }
  }
  return path_;
}

std::string in_store(std::vector<FolderEntry> entries) {
  static std::vector<FolderEntry> held;
  static const bool once = [] {
    set_open_store([](const std::string& url) -> Result<std::shared_ptr<StoreLocation>> {
      if (!url.starts_with(kUrl)) return bad(url + ": is another store");
      std::string prefix = url.substr(std::min(url.size(), std::string(kUrl).size()));
      while (prefix.starts_with('/')) prefix.erase(0, 1);
      while (prefix.ends_with('/')) prefix.pop_back();
      return std::shared_ptr<StoreLocation>(std::make_shared<MemoryStore>(held, prefix));
    });
    return true;
  }();
  static_cast<void>(once);
  held = std::move(entries);
  return kUrl;
}

}  // namespace lowbit::ckpt
