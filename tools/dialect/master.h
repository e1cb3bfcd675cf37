// Float32 weights of a checkpoint to 16 bits, as a run without master weights keeps them.
#pragma once

#include <string>
#include <vector>

#include "dialect/dialect.h"

namespace lowbit::ckpt {

/// Names that `--weights` may say: lowbit's parameter formats of 16 bits.
std::vector<std::string> weight_formats();

/// Puts float32 master weights that an optimizer keeps in the place of the weights, and drops them:
/// `master_param` and the like in a parameter's state (Transformer Engine, FusedAdam), and the lists
/// fp32_from_fp16 of Apex's and Megatron's FP16 optimizers. For a source, before its dialect reads
/// it. An error where it cannot be told which weight a master belongs to.
Result<Document> with_masters(Document document, DialectReport& report);

/// Rounds float32 weights to a format: those that the optimizer's parameters name, or, where they
/// have no names, all of the model's. What the format keeps beside them goes to lowbit's state. Weights of
/// norms that keep running statistics stay float32, as lowbit.to_master_free leaves them. Random
/// bits are lowbit's (docs/formats.md), of step 0 and the stream of the parameter's name.
Result<Document> with_weights(Document document, const std::string& format, uint64_t seed,
                              DialectReport& report);

}  // namespace lowbit::ckpt
