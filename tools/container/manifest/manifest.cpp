#include "container/manifest/manifest.h"

#include "container/manifest/record_reader.h"
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

Container::Container() = default;
Container::~Container() = default;

RecordReader& Container::reader() {
  std::call_once(once_, [this] { reader_ = std::make_unique<RecordReader>(files()); });
  return *reader_;
}

const char* container_name(ContainerKind kind) {
  switch (kind) {
    case ContainerKind::kDcp:
      return "dcp";
    case ContainerKind::kTorch:
      return "torch";
    case ContainerKind::kLegacy:
      return "legacy";
    case ContainerKind::kZero:
      return "zero";
    case ContainerKind::kUniversal:
      return "universal";
    default:
      return "safetensors";
  }
}

Status check_single(const Blob& blob) {
  if (blob.more.empty()) return fine();
  return bad(printable(blob.name) + ": is a tensor of torch." + printable(blob.dtype) + " in " +
             std::to_string(1 + blob.more.size()) +
             " parts, which is not read; leave it out, or load it with torch")
      .at(printable(blob.name));
}

}  // namespace lowbit::ckpt
