// Float32 to codes whose scales cover more than a block: columns, whole tensors, rank 1.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dialect/model/model.h"
#include "dialect/numbers/report.h"
#include "dialect/requantize/dequantize.h"

namespace lowbit::ckpt {

/// Quantizes with a scale along each of `dims` (see CrossTileScale), and gives those scales too.
/// One pass over the values measures them when the first source is read; a second one quantizes.
/// `report` is that of `quantized`.
Codes quantized_cross_tile(std::shared_ptr<Floats> values, const Shape& shape,
                           const std::string& format, const std::vector<int>& dims,
                           std::vector<CrossTileScale>& scales, StateReport* report);

}  // namespace lowbit::ckpt
