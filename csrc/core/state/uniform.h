// 256 evenly spaced values, as adafactor-8bit keeps first moments from its version 0.4.0 on (uf8):
//
//   (q - 128) / 128,  q = 0..255
//
// The values are not symmetric: the largest positive one is 127/128, so a block whose absmax is
// positive shrinks by 1/128 each time that it is stored. linear8 has no such loss. A tie goes to
// the larger value (codebook.h), where adafactor-8bit rounds to the even code.
#pragma once

#include "core/state/codebook.h"

namespace lowbit {

struct UniformMap8 {
  static constexpr int kBits = 8;
  static constexpr bool kSigned = true;
  static constexpr int kCodes = 256;
  static constexpr int kShift = -128, kDivisor = 128;
  static constexpr void fill(float* value) { fill_evenly<UniformMap8>(value); }
};

struct Uniform8 : CodebookFormat<UniformMap8> {
  static constexpr const char* kName = "uniform8";
};

}  // namespace lowbit
