#include "container/manifest.h"

#include "io/text.h"

namespace lowbit::ckpt {

Result<Stored> part_of(Stored stored, const Tensor& tensor, const std::string& what) {
  if (tensor.part.empty()) return stored;
  for (auto& [name, payload] : stored.parts) {
    if (name != tensor.part) continue;
    Stored out;
    out.parts.emplace_back("", std::move(payload));
    return out;
  }
  return bad(what + ": has no inner tensor " + printable(tensor.part));
}

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
