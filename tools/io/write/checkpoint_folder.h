// What of a folder is a checkpoint's own, by its name: what a new checkpoint replaces.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// What lies in a folder that a checkpoint is to be written to.
struct FolderContent {
  bool dcp = false;        // .metadata, or __N.metadata, as torch writes it without collectives
  bool universal = false;  // DeepSpeed's Universal Checkpoint: zero/optimizer_state.pt
  bool data = false;       // __RANK_N.distcp
  /// What is of no checkpoint: files by their names, folders with "/" behind it.
  std::vector<std::string> others = {};
  uint64_t next_number = 0;  // from here on, N of __RANK_N.distcp is free

  /// "config.json and optim/", or "config.json, optim/ and 3 others".
  std::string names() const;
};

/// Whether a file of that name is a directory's of torch.distributed.checkpoint, as torch and
/// lowbit name them.
bool is_dcp_file(std::string_view name);

/// Lists a folder. Links are not followed. A folder in it is a checkpoint's own only as zero/ of a
/// Universal Checkpoint.
Result<FolderContent> folder_content(const std::string& path);

/// One step in which a directory of torch.distributed.checkpoint becomes visible.
struct PublicationStep {
  enum Kind : uint8_t { kRemove, kPut } kind;
  std::string name;
};
/// The steps in order, for any place that can put and remove one file at a time. `there`: all files
/// of the place, the new data files among them; `data`: the new data files; `digests`: whether the
/// new checkpoint has them (lowbit.json). A process killed between two steps leaves the old
/// checkpoint or the new one, at worst without digests and with files that nothing names.
std::vector<PublicationStep> publication(const std::vector<std::string>& there,
                                         const std::set<std::string>& data, bool digests);

/// Publishes the directory of torch.distributed.checkpoint in `from` by moving its files into the
/// folder `to`, where other files stay as they are; removes `from` and what an older checkpoint
/// had. Its data files have names that are free in `to` (FolderContent::next_number). `.metadata`
/// is moved by one rename, and the other files by the order of `publication`. `sync`: wait until
/// each step is on the disk.
Status publish_into(const std::string& from, const std::string& to, bool sync);

/// Removes an old checkpoint's folder `from`. What came into it meanwhile and is not its own is
/// moved to `to`; where that has the name already, it stays, and the folder with it.
void remove_replaced(const std::string& from, const std::string& to);

/// rename() that replaces nothing; 0, or -1 and errno.
int rename_new(const std::string& from, const std::string& to);
/// Whether an error says that the file system has no such call, or not with these flags.
bool lacks_call(int error);

}  // namespace lowbit::ckpt
