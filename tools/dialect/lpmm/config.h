// lpmm's qconfig: how it quantizes the state that this program writes for it.
#pragma once

#include <string>

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

/// lpmm's default: 4 bits, the dynamic map for the first moment and a linear one for the second.
struct LpmmConfig {
  static constexpr int kBits = 4;
  bool quantized = true;
  bool rank1 = false;  // scales of the second moment; of groups otherwise

  /// The configuration for --state-format.
  static Result<LpmmConfig> of(const Wanted& wanted);
  static std::string format(bool is_signed) { return is_signed ? "dynamic4" : "power1_4_unsigned"; }
  /// The tree of settings in lpmm's state dict, which it reads when it resumes.
  Value value() const;
};

}  // namespace lowbit::ckpt
