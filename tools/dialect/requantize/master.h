// Float32 master weights inside an optimizer's state.
#pragma once

#include <string_view>

#include "container/document/document.h"
#include "dialect/numbers/report.h"

namespace lowbit::ckpt {

/// Whether a state of that name is a master weight.
bool is_master(std::string_view name);

/// Replaces the weights by the optimizer's float32 master weights, and removes those from its
/// state: `master_param` and the like in a parameter's state (Transformer Engine, FusedAdam), and
/// the lists fp32_from_fp16 of Apex's and Megatron's FP16 optimizers. Call it before a dialect
/// reads the source. Tied weights all get the one master. An error if it is unknown which weight a
/// master belongs to.
Result<Document> with_masters(Document document, DialectReport& report);

}  // namespace lowbit::ckpt
