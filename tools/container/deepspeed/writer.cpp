#include "container/deepspeed/writer.h"

#include <algorithm>

#include "container/document/torch_archive.h"
#include "io/write/new_directory.h"

namespace lowbit::ckpt {
namespace {

void add_archive(const TorchArchive& archive, WriteReport& report) {
  report.tensors += archive.tensors;
  report.values += archive.values;
  report.chunks += archive.storages.size();
  report.bytes += archive.bytes();
}

}  // namespace

Result<WriteReport> plan_files(const std::vector<FolderFile>& files) {
  WriteReport report;
  for (const FolderFile& file : files) {
    ASSIGN_OR_RETURN(archive, torch_archive(file.document));
    add_archive(archive, report);
  }
  return report;
}

Result<WriteReport> write_files(const std::vector<FolderFile>& files, const Document& source,
                                const std::string& path, const WriteOptions& options) {
  ASSIGN_OR_RETURN(planned, plan_files(files));
  ASSIGN_OR_RETURN(folder, NewDirectory::create(path, options.replace, NewDirectory::Kind::kFolder,
                                                source.sources()));
  const uint64_t piece = std::clamp<uint64_t>(options.memory, 4096, 4u << 20);
  WriteReport report;
  for (const FolderFile& file : files) {
    ASSIGN_OR_RETURN(archive, torch_archive(file.document));
    ASSIGN_OR_RETURN(output, folder->file(file.name));
    ZipWriter zip(*output, archive_folder(file.name));
    const uint64_t before = report.bytes;
    RETURN_IF_ERROR(write_archive(zip, archive, file.document, piece, [&](uint64_t done) {
      return options.progress(before + done, planned.bytes) ? fine() : Status(interrupted());
    }));
    RETURN_IF_ERROR(zip.close());
    RETURN_IF_ERROR(output->close());
    add_archive(archive, report);
  }
  RETURN_IF_ERROR(source.finish());
  RETURN_IF_ERROR(folder->commit());
  report.unchecked = source.unchecked();
  return report;
}

}  // namespace lowbit::ckpt
