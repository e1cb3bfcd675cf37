// Writes a folder of files of torch.save, such as a Universal Checkpoint of DeepSpeed. It appears
// whole or not at all.
#pragma once

#include <string>
#include <vector>

#include "container/document/writer.h"

namespace lowbit::ckpt {

/// One of the files: its way from the folder ("zero/a.weight/fp32.pt"), and what is in it.
struct FolderFile {
  std::string name;
  Document document;
};

/// Writes all files. `source` is what their values are read from.
Result<WriteReport> write_files(const std::vector<FolderFile>& files, const Document& source,
                                const std::string& path, const WriteOptions& options);
/// What write_files would do.
Result<WriteReport> plan_files(const std::vector<FolderFile>& files);

}  // namespace lowbit::ckpt
