// adafactor-8bit's codes of one block, by generation of its files (docs/formats.md has the formulas
// of those that are also lowbit's).
#pragma once

#include <memory>

#include "dialect/blocks.h"

namespace lowbit::ckpt {

/// The five ways in which it has kept second moments.
enum class AdafactorFiles : uint8_t {
  kLinear,      // 0.1.0 to 0.1.2: q / 255 of the block's largest
  kDivided,     // 0.1.3 to 0.2.0: logarithms, divided by 255 twice
  kFixed,       // 0.2.1 to 0.3.1: logarithms from 2^-126
  kAdaptive8,   // 0.4.0 on: logarithms from the block's least
  kAdaptive16,  // 0.4.1 on: the same in 16 bits
};
const char* versions_of(AdafactorFiles files);
/// Scales: the block's factor, and of the adaptive ones its least logarithm.
std::shared_ptr<const BlockRule> second_moment_rule(AdafactorFiles files);

/// The ways in which it has kept momentum, 4 bits (the first code highest) or 8.
enum class AdafactorMomentum : uint8_t {
  kInt4,      // 0.2.1, 0.2.2: scale = largest / 7
  kNormal4,   // 0.2.4, 0.2.5: a table
  kUniform4,  // 0.2.6 on: eighths of the largest
  kUniform8,  // 128ths
  kDynamic4,
  kDynamic8,
};
int bits_of(AdafactorMomentum kind);
const char* name_of(AdafactorMomentum kind);
std::shared_ptr<const BlockRule> momentum_rule(AdafactorMomentum kind);

}  // namespace lowbit::ckpt
