// How lpmm quantizes what this program writes for it: its qconfig.
#pragma once

#include <string>

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

}  // namespace lowbit::ckpt
