// lpmm's scales of rank 1: one maximum for each index of each dimension, of which an element takes
// the least.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "dialect/blocks.h"

namespace lowbit::ckpt {

/// Values of codes by the maxima. They are held in memory while the values are read.
std::shared_ptr<Floats> rank_one_floats(std::vector<float> map, const BlockLayout& layout,
                                        std::shared_ptr<Source> codes, Shape shape,
                                        std::vector<Maxima> maxima);

/// Codes by maxima for each index of each dimension, of which a value takes the least, and the
/// maxima. One pass over the values finds them, when the first source is read.
std::pair<std::shared_ptr<Source>, std::vector<std::shared_ptr<Source>>> rank_one_codes(
    std::shared_ptr<Floats> values, const Shape& shape, std::vector<float> map,
    const BlockLayout& layout, StateReport* report);

}  // namespace lowbit::ckpt
