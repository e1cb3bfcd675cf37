#include "container/manifest.h"

#include "container/record_reader.h"

namespace lowbit::ckpt {

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
    default:
      return "safetensors";
  }
}

}  // namespace lowbit::ckpt
