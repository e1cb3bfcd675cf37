// Megatron-Core's distributed checkpoint ("torch_dist"): a DCP directory with a common state
// (0.16.1, 0.19.2; dist_checkpointing, optimizer/distrib_optimizer.py and optimizer/optimizer.py).
//
//   optimizer.state.<state>.<parameter>   exp_avg, exp_avg_sq, and the float32 weights, which are
//                                         called fp32_param or param
//   chained_<n>.optimizer.state....       where there are several optimizers; some have no prefix
//   common.pt, or the item                the common state: settings and steps; whose parameters
//     common_state/shard_0_1 (0.19)       are in which group is nowhere
//   optimizer.distributed....             flat buckets, whose places for parameters are nowhere
#pragma once

#include "container/document/document.h"

namespace lowbit::ckpt {

/// Whether a document has an optimizer of Megatron-Core.
bool is_megatron(const Document& document);

/// An error where a document that is written as it is would lack what the common state alone has:
/// the steps and settings of its optimizer. Where it has no optimizer, a warning that common.pt is
/// left out. A directory keeps the common state that is one of its items.
Status check_common_kept(const Document& document, const std::string& source, ContainerKind target,
                         std::vector<std::string>& warnings);

/// Leaves out the common state that is an item, where there is an optimizer to translate with it:
/// like common.pt it stays behind.
void leave_common_behind(Document& document);

/// An optimizer of Megatron-Core as torch lays one out, under "optimizer".
struct MegatronView {
  Document document;              // of the optimizer's leaves alone
  std::vector<const Leaf*> rest;  // all others of the original
  std::string undecided;  // a sentence on settings that cannot be known; empty where all are
  std::vector<std::string> warnings = {};
};
Result<MegatronView> megatron_view(const Document& document);

/// The values of a tensor that Megatron-Core before 0.14 flattened: a tensor [X, Y] in shards of
/// [x, y] lies as [X / x, Y / y, x * y]. An error if the shapes do not fit together.
Result<std::shared_ptr<Source>> unflattened(const Leaf& leaf, const Shape& shape);

/// An error where `path` is one of several model-parallel ranks' files of Megatron's older format,
/// or its distributed optimizer's flat buffers: neither has whole parameters. The error begins with
/// `source`, if it is not empty.
Status check_megatron_rank(const std::string& path, const std::string& source = "");

}  // namespace lowbit::ckpt
