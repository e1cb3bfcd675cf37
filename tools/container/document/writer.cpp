#include "container/document/writer.h"

#include "io/write/new_directory.h"
#include "io/write/new_file.h"

namespace lowbit::ckpt {

Status check_target(ContainerKind kind, const Document& document, const std::string& path,
                    const WriteOptions& options) {
  if (kind != ContainerKind::kDcp && kind != ContainerKind::kUniversal)
    return NewFile::check(path, options.replace, document.sources());
  const auto folder =
      kind == ContainerKind::kDcp ? NewDirectory::Kind::kDcp : NewDirectory::Kind::kFolder;
  return NewDirectory::check(path, options.replace, folder, document.sources());
}

Result<WriteReport> write_container(ContainerKind kind, const Document& document,
                                    const std::string& path, const WriteOptions& options) {
  switch (kind) {
    case ContainerKind::kDcp:
      return write_dcp(document, path, options);
    case ContainerKind::kTorch:
      return write_torch(document, path, options);
    case ContainerKind::kSafetensors:
      return write_safetensors(document, path, options);
    case ContainerKind::kZero:
    case ContainerKind::kUniversal:
      return usage("a folder of DeepSpeed is not written by this way");
    default:
      return usage(
          "files of torch before 1.6 are read, not written; write a torch.save zip instead");
  }
}

}  // namespace lowbit::ckpt
