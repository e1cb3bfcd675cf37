#include "io/read/store.h"

#include <algorithm>
#include <map>

#include "io/read/store_cache.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

OpenStore& opener() {
  static OpenStore open;
  return open;
}

class StoreFile : public File {
 public:
  StoreFile(std::shared_ptr<StoreCache> cache, const StoreEntry& entry, std::string key,
            std::string name)
      : File(identity_of(entry), std::move(name)), cache_(std::move(cache)), key_(std::move(key)) {}

 private:
  static FileIdentity identity_of(const StoreEntry& entry) {
    FileIdentity out;
    out.size = entry.size;
    out.version = entry.version;
    return out;
  }
  Status fetch(uint64_t offset, char* out, uint64_t bytes) const override {
    const Status done = cache_->read(key_, size(), offset, out, bytes);
    return done.ok() ? fine() : Status(done.error().at("", name().substr(name().rfind('/') + 1)));
  }
  std::shared_ptr<StoreCache> cache_;
  std::string key_;
};

class StoreFolder : public Directory {
 public:
  StoreFolder(std::string url, std::shared_ptr<StoreLocation> location)
      : Directory(std::move(url)), cache_(std::make_shared<StoreCache>(std::move(location))) {}

  Result<std::vector<std::string>> list() const override {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) names.push_back(name);
    return names;
  }
  bool has(const std::string& name) const override { return entries_.contains(name); }
  Result<std::shared_ptr<File>> file(const std::string& name) const override {
    if (!is_entry_name(name))
      return bad(printable(path_) + ": the file name '" + printable(name) +
                 "' leads out of the folder");
    const auto found = entries_.find(name);
    if (found == entries_.end()) return bad(shown(name) + ": is not there");
    if (found->second.kind != PathKind::kFile)
      return bad(shown(name) + ": is a folder, not an object");
    return std::shared_ptr<File>(
        std::make_shared<StoreFile>(cache_, found->second, name, shown(name)));
  }
  Result<std::shared_ptr<Directory>> folder(const std::string& name) const override {
    if (!is_entry_name(name))
      return bad(printable(path_) + ": the folder name '" + printable(name) + "' leads out of it");
    return open_store_folder(path_ + (path_.ends_with('/') ? "" : "/") + name);
  }
  Status refresh() override {
    ASSIGN_OR_RETURN(listed, cache_->location().list());
    entries_.clear();
    for (StoreEntry& entry : listed) {
      if (is_entry_name(entry.name)) entries_[entry.name] = entry;
    }
    return fine();
  }

 private:
  std::shared_ptr<StoreCache> cache_;
  std::map<std::string, StoreEntry> entries_;
};

class StoreObject : public Directory {
 public:
  StoreObject(std::string url, std::shared_ptr<StoreLocation> location)
      : Directory(std::move(url)),
        name_(path_.substr(path_.find_last_of('/') + 1)),
        cache_(std::make_shared<StoreCache>(std::move(location))) {}

  std::string shown(const std::string&) const override { return printable(path_); }
  Result<std::vector<std::string>> list() const override { return std::vector<std::string>{name_}; }
  bool has(const std::string& name) const override { return name == name_; }
  Result<std::shared_ptr<File>> file(const std::string& name) const override {
    ASSIGN_OR_RETURN(entry, cache_->location().info(""));
    if (name != name_ || entry.kind != PathKind::kFile)
      return bad(printable(path_) + ": is not there");
    return std::shared_ptr<File>(std::make_shared<StoreFile>(cache_, entry, "", shown(name)));
  }
  Result<std::shared_ptr<Directory>> folder(const std::string&) const override {
    return bad(printable(path_) + ": is an object, not a folder");
  }

 private:
  std::string name_;
  std::shared_ptr<StoreCache> cache_;
};

}  // namespace

bool is_url(const std::string& path) {
  const size_t end = path.find("://");
  if (end == std::string::npos || end == 0) return false;
  return std::all_of(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(end), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '+' ||
           c == '-' || c == '.' || c == ':';
  });
}

void set_open_store(OpenStore open) { opener() = std::move(open); }

Result<std::shared_ptr<StoreLocation>> open_store(const std::string& url) {
  if (opener() == nullptr) RETURN_IF_ERROR(check_no_url(url));
  return opener()(url);
}

Status check_no_stream(const std::string& target) {
  if (target != "-") return fine();
  return usage("-: a checkpoint is not written to standard output; name a file or folder");
}

Status check_no_url(const std::string& target) {
  if (!is_url(target)) return fine();
  return usage(
      printable(target) +
      ": object stores are read and written from Python, which has fsspec: "
      "lowbit.checkpoint.inspect(\"s3://...\"), verify, convert, reshard and diff take the "
      "options of this program");
}

Result<std::shared_ptr<Directory>> open_store_folder(const std::string& url) {
  ASSIGN_OR_RETURN(location, open_store(url));
  const auto folder = std::make_shared<StoreFolder>(url, std::move(location));
  RETURN_IF_ERROR(folder->refresh());
  return std::shared_ptr<Directory>(folder);
}

Result<std::shared_ptr<Directory>> open_store_object(const std::string& url) {
  ASSIGN_OR_RETURN(location, open_store(url));
  return std::shared_ptr<Directory>(std::make_shared<StoreObject>(url, std::move(location)));
}

}  // namespace lowbit::ckpt
