// Megatron-Core's distributed checkpoint ("torch_dist"): a DCP directory with common.pt beside it
// (0.16.1; dist_checkpointing, optimizer/distrib_optimizer.py and optimizer/optimizer.py).
//
//   optimizer.state.<state>.<parameter>   exp_avg, exp_avg_sq, and the float32 weights, which are
//                                         called fp32_param or param
//   chained_<n>.optimizer.state....       where there are several optimizers
//   common.pt                             settings and steps; whose parameters are in which group
//                                         is nowhere
//   optimizer.distributed....             flat buckets, whose places for parameters are nowhere
#pragma once

#include "container/document/document.h"

namespace lowbit::ckpt {

/// Whether a document has an optimizer of Megatron-Core.
bool is_megatron(const Document& document);

/// An error where a document that is written as it is would lack what only common.pt has: the steps
/// and settings of its optimizer. Where it has no optimizer, a warning that common.pt is left out.
Status check_common_kept(const Document& document, const std::string& source,
                         std::vector<std::string>& warnings);

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
