#include "container/open.h"

#include "io/text.h"

namespace lowbit::ckpt {

Result<std::shared_ptr<const Manifest>> read_manifest(const std::string& path) {
  LB_TRY(manifest, read_dcp(path));
  return std::shared_ptr<const Manifest>(std::make_shared<Manifest>(std::move(manifest)));
}

Result<Document> open_checkpoint(const std::string& path) {
  LB_TRY(manifest, read_manifest(path));
  return document_of(std::move(manifest));
}

}  // namespace lowbit::ckpt
