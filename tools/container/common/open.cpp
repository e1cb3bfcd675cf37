#include "container/common/open.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "container/common/archive.h"
#include "io/partial_name.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The pickle of torch's magic number, with which files of the old format start.
constexpr std::string_view kLegacyMagic("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", 15);

Result<Manifest> read_file(const std::string& path) {
  std::string head(512, '\0');
  {
    ASSIGN_OR_RETURN(archive, Archive::open(path));
    ASSIGN_OR_RETURN(file, archive->file());
    if (file->size() == 0) return bad(archive->what() + ": is empty");
    head.resize(std::min<uint64_t>(head.size(), file->size()));
    RETURN_IF_ERROR(file->read(0, head.data(), head.size()));
  }
  const std::string what = printable(path);
  if (head.starts_with("PK")) return read_torch_zip(path);
  if (head.starts_with(kLegacyMagic)) return read_torch_legacy(path);
  if (head.size() == 512 && head.substr(257, 5) == "ustar")
    return bad(what +
               ": is a tar of torch before 0.1.10, which is not read; load and save it with "
               "that torch");
  if (head.starts_with("\x80") && head.size() > 1 && head[1] <= 5)
    return bad(what + ": is a pickle, but not of torch.save");
  // A length, and then a JSON object, which may have spaces before it.
  if (head.size() > 8 && head[6] == 0 && head[7] == 0 &&
      (head[8] == '{' || head[8] == ' ' || head[8] == '\t' || head[8] == '\n' || head[8] == '\r'))
    return read_safetensors(path);
  return bad(what + ": is neither a file of torch.save nor of safetensors (it starts with '" +
             printable(head.substr(0, 8)) + "')");
}

}  // namespace

Result<std::shared_ptr<const Manifest>> read_manifest(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return not_opened("cannot open " + printable(path));
  if (is_partial(path))
    return bad(printable(path) +
               ": was left by a program that was killed while it wrote; delete it");
  ASSIGN_OR_RETURN(manifest, S_ISDIR(info.st_mode) ? read_dcp(path) : read_file(path));
  return std::shared_ptr<const Manifest>(std::make_shared<Manifest>(std::move(manifest)));
}

Result<Document> open_checkpoint(const std::string& path) {
  ASSIGN_OR_RETURN(manifest, read_manifest(path));
  return document_of(std::move(manifest));
}

}  // namespace lowbit::ckpt
