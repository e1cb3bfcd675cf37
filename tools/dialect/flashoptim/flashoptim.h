// FlashOptim's dialect: its reader, its writer, and the codes of its blocks.
#pragma once

#include <memory>

#include "dialect/common/dialect.h"
#include "dialect/requantize/blocks.h"

namespace lowbit::ckpt {

inline constexpr int64_t kFlashBlock = 32;
inline constexpr const char* kFlashMoments[] = {"exp_avg", "exp_avg_sq", "momentum_buffer"};

/// The blocks of so many values.
inline uint64_t blocks_in(uint64_t count) { return (count + kFlashBlock - 1) / kFlashBlock; }
/// Whether scales are of blocks that begin with each rank's shard. Where their number fits those of
/// the whole tensor too, as the ranks saved it: lowbit-ckpt writes blocks of the whole tensor.
bool is_by_shard(const Leaf& codes, const Leaf& scales, const Manifest& manifest);

/// The two generations of its scales.
enum class FlashFiles : uint8_t { kOld, kNew };
const char* versions_of(FlashFiles files);

/// The rule of a block. Codes count from 0 here, from -127 in FlashOptim's int8.
std::shared_ptr<const BlockRule> flash_rule(bool is_signed);
BlockLayout flash_layout(uint64_t count, bool is_signed);

/// An error if another cut of the document's tensors loses where the blocks of ranks' shards begin.
Status check_blocks_kept(const Document& document);
Result<Model> read_flashoptim(std::shared_ptr<const Document> document, const OptimizerTree& tree);
Result<Document> write_flashoptim(const Model& model, const Wanted& wanted, DialectReport& report);

}  // namespace lowbit::ckpt
