// A folder in one input of the fuzzer: its entries, one behind the other.
//
//   "\n@@ NAME\n" and the bytes of the file NAME, for each; NAME may be
//   "a/b", "a/" (a folder), or "a -> b" (a link to b).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lowbit::ckpt {

struct FolderEntry {
  std::string name, data;
};

std::vector<FolderEntry> entries_of(std::string_view input);
std::string text_of(const std::vector<FolderEntry>& entries);

/// A folder of these entries on disk, which goes with this object. Names that no file system takes,
/// or that would lie outside of it, are left out; links may lead anywhere.
class FolderOnDisk {
 public:
  FolderOnDisk();
  ~FolderOnDisk();
  FolderOnDisk(const FolderOnDisk&) = delete;
  FolderOnDisk& operator=(const FolderOnDisk&) = delete;
  const std::string& hold(const std::vector<FolderEntry>& entries) const;

 private:
  std::string path_;
};

/// The URL of a store in memory that has these entries. It lists them as they are: a name may be
/// "..", be there twice, or lead anywhere. "a -> N" tells a size of N bytes that a does not have.
std::string in_store(std::vector<FolderEntry> entries);

}  // namespace lowbit::ckpt
