// lpmm's rank-1 scales: an absmax for each index of each dimension. An element takes the least of
// its own.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "dialect/requantize/blocks.h"
#include "dialect/requantize/dequantize.h"

namespace lowbit::ckpt {

/// The values of codes. The scales are held in memory.
std::shared_ptr<Floats> rank_one_floats(std::vector<float> map, const BlockLayout& layout,
                                        std::shared_ptr<Source> codes, const Shape& shape,
                                        std::vector<CrossTileScale> scales);

/// The codes of values, and the scales along each dimension. One pass over the values measures the
/// scales when the first source is read.
std::pair<std::shared_ptr<Source>, std::vector<std::shared_ptr<Source>>> rank_one_codes(
    std::shared_ptr<Floats> values, const Shape& shape, std::vector<float> map,
    const BlockLayout& layout, StateReport* report);

}  // namespace lowbit::ckpt
