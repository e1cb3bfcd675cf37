// What a leaf of torchao's holds: one state, quantized or plain, in one part or one for each rank.
#pragma once

#include "dialect/model/model.h"
#include "dialect/torchao/kind.h"

namespace lowbit::ckpt {

/// One state of one parameter, with the kind of its quantized parts.
struct TorchaoState {
  State state;
  const TorchaoKind* kind = nullptr;  // of the quantized parts; null if there are none
  int64_t block = 0;
};
Result<TorchaoState> torchao_state(const Document& document, const Leaf& leaf);

}  // namespace lowbit::ckpt
