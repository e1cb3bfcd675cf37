// The state dict of torchao's CPUOffloadOptimizer (0.18.0, optim/cpu_offload.py), which has one
// optimizer for each large parameter, and one for all small ones:
//
//   {"offloaded": [{"state": {0: ...}, "param_groups": [{"lr": ..., "params": [0]}]}, ...],
//    "on-device": {"state": {0: ..., 1: ...}, "param_groups": [...]}}
//
// "on-device" is missing where no parameter is small.
#pragma once

#include <vector>

#include "dialect/tree/optimizer_root.h"

namespace lowbit::ckpt {

/// The roots, where those of one CPUOffloadOptimizer are the path around them, unless one inside is
/// chosen.
std::vector<OptimizerRoot> joined_offload(const Document& document,
                                          std::vector<OptimizerRoot> roots);

/// The same state as one optimizer's at the path around it: groups of equal settings that follow
/// one another are one. Parameters are numbered in the order of the lists, those on the device
/// behind the others; what their order in the model is, the file does not tell.
struct OffloadView {
  Document document;
  std::vector<const Leaf*> rest;  // all other leaves
  size_t offloaded = 0, on_device = 0;
};
Result<OffloadView> offload_view(const Document& document, const Path& root);

}  // namespace lowbit::ckpt
