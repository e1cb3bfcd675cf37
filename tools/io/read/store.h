// Object stores, such as S3: what a path is that begins like "s3://". Whoever knows how to talk to
// one says so (tools/python does); a program that does not refuses such paths.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/read/file.h"

namespace lowbit::ckpt {

/// Whether a path is a URL: SCHEME://...
bool is_url(const std::string& path);

/// What a store tells of an object, or of the folder that its name is the beginning of.
struct StoreEntry {
  std::string name;
  PathKind kind = PathKind::kMissing;  // or kFile, kFolder
  uint64_t size = 0;
  std::string version;  // another one tells that the object was rewritten; "" where none is told
};

/// A URL of a store. Names are those of entries below it, "" is the URL itself. All functions are
/// thread-safe; each is one request, and errors say URL and reason.
class StoreLocation {
 public:
  virtual ~StoreLocation() = default;
  virtual Result<StoreEntry> info(const std::string& name) = 0;
  virtual Result<std::vector<StoreEntry>> list() = 0;
  /// Bytes [begin, end) of an object.
  virtual Result<std::string> read(const std::string& name, uint64_t begin, uint64_t end) = 0;
};

using OpenStore = std::function<Result<std::shared_ptr<StoreLocation>>(const std::string& url)>;
/// What opens URLs from now on, in the whole process. Call it before the first of them.
void set_open_store(OpenStore open);

Result<std::shared_ptr<StoreLocation>> open_store(const std::string& url);
/// The error for a URL that is to be written: a store is written from Python.
Status check_no_url(const std::string& target);
/// An error where a target is "-", which other programs take for standard output.
Status check_no_stream(const std::string& target);

/// A folder: its entries are listed once, and their sizes and versions kept.
Result<std::shared_ptr<Directory>> open_store_folder(const std::string& url);
/// A folder that has one file, the object of that URL; its parent is not looked into.
Result<std::shared_ptr<Directory>> open_store_object(const std::string& url);

}  // namespace lowbit::ckpt
