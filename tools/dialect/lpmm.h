// lpmm's state dict: the two halves of its dialect.
#pragma once

#include "dialect/dialect.h"

namespace lowbit::ckpt {

/// Codes are stored for a multiple of so many.
inline constexpr uint64_t kLpmmPack = 2048;
inline constexpr int64_t kLpmmGroup = 128;
/// The states that it may quantize.
inline constexpr const char* kLpmmStates[] = {"exp_avg", "exp_avg_sq", "momentum_buffer"};

/// Whether a leaf is of the settings that lpmm keeps beside state and groups.
bool is_lpmm_config(const Model& model, const Leaf& leaf);

Result<Model> read_lpmm(std::shared_ptr<const Document> document);
Result<Document> write_lpmm(const Model& model, const Wanted& wanted, DialectReport& report);

}  // namespace lowbit::ckpt
