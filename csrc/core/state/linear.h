// Evenly spaced values of 2 to 8 bits.
//
//   signed     (q - R) / R,  q = 0..2R,  R = 2^(B-1) - 1; the last code is unused
//   unsigned   q / (2^B - 1)
#pragma once

#include "core/state/codebook.h"

namespace lowbit {

template <int kB, bool kS>
struct LinearMap {
  static constexpr int kBits = kB;
  static constexpr bool kSigned = kS;
  static constexpr int kCodes = kS ? (1 << kB) - 1 : 1 << kB;
  static constexpr int kShift = kS ? 1 - (1 << (kB - 1)) : 0, kDivisor = kCodes - 1 + kShift;
  static constexpr void fill(float* value) { fill_evenly<LinearMap>(value); }
};

struct Linear2 : CodebookFormat<LinearMap<2, true>> {
  static constexpr const char* kName = "linear2";
};
struct Linear2Unsigned : CodebookFormat<LinearMap<2, false>> {
  static constexpr const char* kName = "linear2_unsigned";
};
struct Linear3 : CodebookFormat<LinearMap<3, true>> {
  static constexpr const char* kName = "linear3";
};
struct Linear3Unsigned : CodebookFormat<LinearMap<3, false>> {
  static constexpr const char* kName = "linear3_unsigned";
};
struct Linear4 : CodebookFormat<LinearMap<4, true>> {
  static constexpr const char* kName = "linear4";
};
struct Linear4Unsigned : CodebookFormat<LinearMap<4, false>> {
  static constexpr const char* kName = "linear4_unsigned";
};
struct Linear5 : CodebookFormat<LinearMap<5, true>> {
  static constexpr const char* kName = "linear5";
};
struct Linear5Unsigned : CodebookFormat<LinearMap<5, false>> {
  static constexpr const char* kName = "linear5_unsigned";
};
struct Linear6 : CodebookFormat<LinearMap<6, true>> {
  static constexpr const char* kName = "linear6";
};
struct Linear6Unsigned : CodebookFormat<LinearMap<6, false>> {
  static constexpr const char* kName = "linear6_unsigned";
};
struct Linear7 : CodebookFormat<LinearMap<7, true>> {
  static constexpr const char* kName = "linear7";
};
struct Linear7Unsigned : CodebookFormat<LinearMap<7, false>> {
  static constexpr const char* kName = "linear7_unsigned";
};
struct Linear8 : CodebookFormat<LinearMap<8, true>> {
  static constexpr const char* kName = "linear8";
};
struct Linear8Unsigned : CodebookFormat<LinearMap<8, false>> {
  static constexpr const char* kName = "linear8_unsigned";
};

}  // namespace lowbit
