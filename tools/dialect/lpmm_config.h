// How lpmm quantizes what this program writes for it: its qconfig, maps, and scales of rank 1.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dialect/blocks.h"
#include "dialect/dialect.h"

namespace lowbit::ckpt {

/// lpmm's default: 4 bits, the first moment by the dynamic map, the second by even steps.
struct LpmmConfig {
  static constexpr int kBits = 4;
  bool quantized = true;
  bool rank1 = false;  // scales of the second moment; of groups otherwise

  /// By --state-format.
  static Result<LpmmConfig> of(const Wanted& wanted);
  static std::string format(bool is_signed) { return is_signed ? "dynamic4" : "power1_4_unsigned"; }
  /// The tree of settings that lpmm keeps in its state dict and reads when it goes on.
  Value value() const;
};

/// The values of the codes of one of lowbit's maps.
std::vector<float> map_of(const std::string& format);

/// Codes by maxima for each index of each dimension, of which a value takes the least, and the
/// maxima. One pass over the values finds them, when the first source is read.
std::pair<std::shared_ptr<Source>, std::vector<std::shared_ptr<Source>>> rank_one_codes(
    std::shared_ptr<Floats> values, const Shape& shape, std::vector<float> map,
    const BlockLayout& layout, StateReport* report);

}  // namespace lowbit::ckpt
