#include "container/manifest.h"

namespace lowbit::ckpt {

const char* container_name(ContainerKind kind) {
  switch (kind) {
    case ContainerKind::kDcp:
      return "dcp";
    case ContainerKind::kTorch:
      return "torch";
    case ContainerKind::kLegacy:
      return "legacy";
    default:
      return "safetensors";
  }
}

}  // namespace lowbit::ckpt
