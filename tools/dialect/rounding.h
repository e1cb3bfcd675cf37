// Float32 weights of a checkpoint to 16 bits, as a run without master weights keeps them.
#pragma once

#include <string>
#include <vector>

#include "dialect/dialect.h"

namespace lowbit::ckpt {

/// Names that `--weights` may say: lowbit's parameter formats of 16 bits.
std::vector<std::string> weight_formats();

/// Rounds float32 weights to a format: those that the optimizer's parameters name, or, where they
/// have no names, all of the model's. What the format keeps beside them goes to lowbit's state. Weights of
/// norms that keep running statistics stay float32, as lowbit.to_master_free leaves them. Random
/// bits are lowbit's (docs/formats.md), of step 0 and the stream of the parameter's name.
Result<Document> with_weights(Document document, const std::string& format, uint64_t seed,
                              DialectReport& report);

}  // namespace lowbit::ckpt
