// Float32 master weights that an optimizer keeps.
#pragma once

#include <string_view>

#include "dialect/dialect.h"

namespace lowbit::ckpt {

/// Whether an optimizer's state keeps its master under this name.
bool is_master(std::string_view name);

/// Puts float32 master weights that an optimizer keeps in the place of the weights, and drops them:
/// `master_param` and the like in a parameter's state (Transformer Engine, FusedAdam), and the lists
/// fp32_from_fp16 of Apex's and Megatron's FP16 optimizers. For a source, before its dialect reads
/// it. An error where it cannot be told which weight a master belongs to.
Result<Document> with_masters(Document document, DialectReport& report);

}  // namespace lowbit::ckpt
