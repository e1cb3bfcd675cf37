// lpmm's dialect: its reader and its writer.
#pragma once

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

/// The number of stored codes is a multiple of this.
inline constexpr uint64_t kLpmmPack = 2048;
inline constexpr int64_t kLpmmGroup = 128;
/// The states that lpmm can quantize.
inline constexpr const char* kLpmmStates[] = {"exp_avg", "exp_avg_sq", "momentum_buffer"};

/// Whether a leaf belongs to the qconfig, which lpmm stores beside state and groups.
bool is_lpmm_config(const Model& model, const Leaf& leaf);

Result<Model> read_lpmm(std::shared_ptr<const Document> document, const OptimizerTree& tree);
Result<Document> write_lpmm(const Model& model, const Wanted& wanted, DialectReport& report);

}  // namespace lowbit::ckpt
