// How adafactor-8bit quantizes a block, by generation of its files. docs/definitions/formats.md has
// the formulas of those that are lowbit's too.
#pragma once

#include <memory>

#include "dialect/requantize/blocks.h"

namespace lowbit::ckpt {

/// The generations of its second moments.
enum class AdafactorFiles : uint8_t {
  kLinear,      // 0.1.0 to 0.1.2: q / 255 of the block's largest
  kDivided,     // 0.1.3 to 0.2.0: logarithms, divided by 255 twice
  kFixed,       // 0.2.1 to 0.3.1: logarithms from 2^-126
  kAdaptive8,   // 0.4.0 on: logarithms from the block's least
  kAdaptive16,  // 0.4.1 on: the same in 16 bits
};
const char* versions_of(AdafactorFiles files);
/// The rule of a generation. A scale is the factor of a block; the adaptive ones also have its
/// least logarithm.
std::shared_ptr<const BlockRule> second_moment_rule(AdafactorFiles files);

/// The generations of its momentum, in 4 bits (the first code in the high bits) or in 8.
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
