// Rounds the float32 weights of a checkpoint to 16 bits, as a run without master weights stores
// them.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "container/document/document.h"
#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

/// The names that `--weights` accepts: lowbit's 16-bit parameter formats.
std::vector<std::string> weight_formats();

/// Norms that keep running statistics, by the path of their module: their weights stay float32.
std::set<std::string> norms_of(const std::vector<Leaf>& leaves);
bool is_of_norm(const std::string& weight, const std::set<std::string>& norms);

/// Rounds float32 weights to a format: those that the optimizer's parameters name, or all of the
/// model's if parameters have no names. The format's compensation goes into lowbit's state. Weights
/// of norms with running statistics stay float32, as in lowbit.to_master_free. Random bits are
/// lowbit's (docs/definitions/formats.md), of step 0 and the stream of the parameter's name. Tied
/// weights get the same values.
Result<Document> with_weights(Document document, const std::string& format, uint64_t seed,
                              DialectReport& report);

}  // namespace lowbit::ckpt
