// What a conversion did to the numbers of each state.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "dialect/numbers/square_sum.h"

namespace lowbit::ckpt {

/// What rounding float64 to float32 did to the values that were read.
struct RoundingError {
  double limit = 0;  // the largest difference
  SquareSum values, differences;
  double relative() const;
};

/// What happened to one state on the way.
struct StateReport {
  std::string param, state, from, to;
  bool exact = true;                    // relabelled or copied; else:
  double max_error = 0;                 // largest difference to the dequantized source
  double relative_error = 0;            // 2-norm of the difference over the 2-norm of the source
  double squares = 0, differences = 0;  // what that is made of, over all that was read so far
  std::shared_ptr<const RoundingError> before = {};  // of float64, read as float32
};

struct DialectReport {
  std::deque<StateReport> states;  // errors are filled while the document is written, so they stay
                                   // where they are
  std::vector<std::string> warnings;
  /// Adds a warning, once.
  void warn(std::string text) {
    if (std::ranges::find(warnings, text) == warnings.end()) warnings.push_back(std::move(text));
  }
};

}  // namespace lowbit::ckpt
