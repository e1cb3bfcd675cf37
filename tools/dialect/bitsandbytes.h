// bitsandbytes' state dict: the two halves of its dialect.
#pragma once

#include <string>
#include <vector>

#include "dialect/dialect.h"

namespace lowbit::ckpt {

/// Under which versions since 0.49.2 keep the tensors of a state.
inline constexpr const char* kBnbWrapper = "__bnb_optimizer_quant_state__";
/// Blocks of bitsandbytes since 0.44, and parameters with fewer elements keep float32.
inline constexpr int64_t kBnbBlock = 256;
inline constexpr uint64_t kBnbLeast = 4096;

/// Which states of an algorithm bitsandbytes keeps in its state1 and state2; state1 of AdEMAMix
/// holds two. Empty where it has no such optimizer.
struct BnbSlots {
  std::vector<std::string> first = {};
  std::string second = {};
};
BnbSlots bnb_slots(const std::string& algorithm);

Result<Model> read_bitsandbytes(std::shared_ptr<const Document> document);
Result<Document> write_bitsandbytes(const Model& model, const Wanted& wanted,
                                    DialectReport& report);

}  // namespace lowbit::ckpt
