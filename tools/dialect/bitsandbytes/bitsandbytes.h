// bitsandbytes' dialect: its reader and its writer.
#pragma once

#include <string>
#include <vector>

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

/// The key under which versions since 0.49.2 store the tensors of a state.
inline constexpr const char* kBnbWrapper = "__bnb_optimizer_quant_state__";
/// The block length since 0.44, and the number of elements below which state stays float32.
inline constexpr int64_t kBnbBlock = 256;
inline constexpr uint64_t kBnbMin = 4096;

/// The states of an algorithm in bitsandbytes' state1 and state2. state1 of AdEMAMix holds two.
/// Empty if bitsandbytes has no such optimizer.
struct BnbSlots {
  std::vector<std::string> first = {};
  std::string second = {};
};
BnbSlots bnb_slots(const std::string& algorithm);

Result<Model> read_bitsandbytes(std::shared_ptr<const Document> document,
                                const OptimizerTree& tree);
Result<Document> write_bitsandbytes(const Model& model, const Wanted& wanted,
                                    DialectReport& report);

}  // namespace lowbit::ckpt
