#include <algorithm>

#include "container/document/torch_archive.h"
#include "container/document/writer.h"
#include "io/write/new_file.h"

namespace lowbit::ckpt {

Result<WriteReport> write_torch(const Document& document, const std::string& path,
                                const WriteOptions& options) {
  ASSIGN_OR_RETURN(archive, torch_archive(document));
  ASSIGN_OR_RETURN(file, NewFile::create(path, options.replace, document.sources()));
  ZipWriter zip(file->output(), archive_folder(path));
  const uint64_t total = archive.bytes(),
                 piece = std::clamp<uint64_t>(options.memory, 4096, 4u << 20);
  RETURN_IF_ERROR(write_archive(zip, archive, document, piece, [&](uint64_t done) {
    return options.progress(done, total) ? fine() : Status(interrupted());
  }));
  RETURN_IF_ERROR(zip.close());
  RETURN_IF_ERROR(document.finish());
  RETURN_IF_ERROR(file->commit());
  WriteReport report;
  report.unchecked = document.unchecked();
  report.tensors = archive.tensors;
  report.values = archive.values;
  report.chunks = archive.storages.size();
  report.bytes = total;
  return report;
}

}  // namespace lowbit::ckpt
