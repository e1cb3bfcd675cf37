#include "dialect/torchao/kind.h"

namespace lowbit::ckpt {

const TorchaoKind* torchao_kind(const std::string& cls) {
  if (!cls.starts_with("torchao.")) return nullptr;
  for (const TorchaoKind& kind : kTorchaoKinds) {
    if (cls.ends_with(std::string(".") + kind.cls)) return &kind;
  }
  return nullptr;
}

}  // namespace lowbit::ckpt
