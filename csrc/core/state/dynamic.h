// The dynamic map of dynamic8.h for 2 to 7 bits, with one decade less for each bit less. Decade i =
// 0..B-2 has n = 2^i magnitudes (signed) or 2^(i+1) (unsigned),
//
//   10^(i-(B-2)) * (0.1 + 0.9 * (2 j + 1) / (2 n)),  j = 0..n-1,
//
// plus 0 and 1. Signed: zero is code 2^(B-1) - 1, and there is no -1. The entries have the same
// bits as lpmm's nonlinear maps and, for 4 signed bits, torchao's.
#pragma once

#include "core/linspace.h"
#include "core/state/codebook.h"

namespace lowbit {

template <int kB, bool kS>
struct DynamicMap {
  static_assert(kB < 8, "dynamic8.h");
  static constexpr int kBits = kB;
  static constexpr bool kSigned = kS, kDynamic = true;
  static constexpr int kCodes = 1 << kB;
  static constexpr void fill(float* value) {
    constexpr float kTen[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    constexpr int kZero = kS ? (1 << (kB - 1)) - 1 : 0;
    int m = 0;
    value[kZero] = 0.0f;
    for (int i = 0; i <= kB - 2; ++i) {
      const int n = 1 << (kS ? i : i + 1);
      for (int j = 0; j < n; ++j) {
        const float centre =
            (linspace(0.1f, 1.0f, n + 1, j) + linspace(0.1f, 1.0f, n + 1, j + 1)) / 2.0f;
        const float magnitude = kTen[i + 8 - kB] * centre;
        ++m;
        value[kZero + m] = magnitude;
        if (kS) value[kZero - m] = -magnitude;
      }
    }
    value[kCodes - 1] = 1.0f;
  }
};

struct Dynamic2 : CodebookFormat<DynamicMap<2, true>> {
  static constexpr const char* kName = "dynamic2";
};
struct Dynamic2Unsigned : CodebookFormat<DynamicMap<2, false>> {
  static constexpr const char* kName = "dynamic2_unsigned";
};
struct Dynamic3 : CodebookFormat<DynamicMap<3, true>> {
  static constexpr const char* kName = "dynamic3";
};
struct Dynamic3Unsigned : CodebookFormat<DynamicMap<3, false>> {
  static constexpr const char* kName = "dynamic3_unsigned";
};
struct Dynamic4 : CodebookFormat<DynamicMap<4, true>> {
  static constexpr const char* kName = "dynamic4";
};
struct Dynamic4Unsigned : CodebookFormat<DynamicMap<4, false>> {
  static constexpr const char* kName = "dynamic4_unsigned";
};
struct Dynamic5 : CodebookFormat<DynamicMap<5, true>> {
  static constexpr const char* kName = "dynamic5";
};
struct Dynamic5Unsigned : CodebookFormat<DynamicMap<5, false>> {
  static constexpr const char* kName = "dynamic5_unsigned";
};
struct Dynamic6 : CodebookFormat<DynamicMap<6, true>> {
  static constexpr const char* kName = "dynamic6";
};
struct Dynamic6Unsigned : CodebookFormat<DynamicMap<6, false>> {
  static constexpr const char* kName = "dynamic6_unsigned";
};
struct Dynamic7 : CodebookFormat<DynamicMap<7, true>> {
  static constexpr const char* kName = "dynamic7";
};
struct Dynamic7Unsigned : CodebookFormat<DynamicMap<7, false>> {
  static constexpr const char* kName = "dynamic7_unsigned";
};

}  // namespace lowbit
