// lpmm's power maps of 2 to 8 bits, which have no zero.
//
//   power1            linspace(-1, 1, 2^B)              power1 unsigned   (k + 1) / 2^B
//   power2            sgn(y) y^2, y as in power1        power2 unsigned   ((k + 1) / 2^B)^2
//
// Signed: z = 0 lies in the middle of the two smallest entries and becomes the positive one. The
// unsigned 4-bit power-1 map is also torchao's.
#pragma once

#include "core/linspace.h"
#include "core/state/codebook.h"

namespace lowbit {

template <int kP, int kB, bool kS>
struct PowerMap {
  static constexpr int kBits = kB, kPower = kP;
  static constexpr bool kSigned = kS;
  static constexpr int kCodes = 1 << kB;
  static constexpr void fill(float* value) {
    for (int k = 0; k < kCodes; ++k) {
      const float y = kS ? linspace(-1.0f, 1.0f, kCodes, k)
                         : static_cast<float>(k + 1) / static_cast<float>(kCodes);
      value[k] = kPower == 1 ? y : y < 0.0f ? -(y * y) : y * y;
    }
  }
};

/// power1 unsigned: evenly spaced.
template <int kB>
struct PowerOneUnsignedMap : PowerMap<1, kB, false> {
  static constexpr int kShift = 1, kDivisor = 1 << kB;
};

struct PowerOne2 : CodebookFormat<PowerMap<1, 2, true>> {
  static constexpr const char* kName = "power1_2";
};
struct PowerOne2Unsigned : CodebookFormat<PowerOneUnsignedMap<2>> {
  static constexpr const char* kName = "power1_2_unsigned";
};
struct PowerOne3 : CodebookFormat<PowerMap<1, 3, true>> {
  static constexpr const char* kName = "power1_3";
};
struct PowerOne3Unsigned : CodebookFormat<PowerOneUnsignedMap<3>> {
  static constexpr const char* kName = "power1_3_unsigned";
};
struct PowerOne4 : CodebookFormat<PowerMap<1, 4, true>> {
  static constexpr const char* kName = "power1_4";
};
struct PowerOne4Unsigned : CodebookFormat<PowerOneUnsignedMap<4>> {
  static constexpr const char* kName = "power1_4_unsigned";
};
struct PowerOne5 : CodebookFormat<PowerMap<1, 5, true>> {
  static constexpr const char* kName = "power1_5";
};
struct PowerOne5Unsigned : CodebookFormat<PowerOneUnsignedMap<5>> {
  static constexpr const char* kName = "power1_5_unsigned";
};
struct PowerOne6 : CodebookFormat<PowerMap<1, 6, true>> {
  static constexpr const char* kName = "power1_6";
};
struct PowerOne6Unsigned : CodebookFormat<PowerOneUnsignedMap<6>> {
  static constexpr const char* kName = "power1_6_unsigned";
};
struct PowerOne7 : CodebookFormat<PowerMap<1, 7, true>> {
  static constexpr const char* kName = "power1_7";
};
struct PowerOne7Unsigned : CodebookFormat<PowerOneUnsignedMap<7>> {
  static constexpr const char* kName = "power1_7_unsigned";
};
struct PowerOne8 : CodebookFormat<PowerMap<1, 8, true>> {
  static constexpr const char* kName = "power1_8";
};
struct PowerOne8Unsigned : CodebookFormat<PowerOneUnsignedMap<8>> {
  static constexpr const char* kName = "power1_8_unsigned";
};
struct PowerTwo2 : CodebookFormat<PowerMap<2, 2, true>> {
  static constexpr const char* kName = "power2_2";
};
struct PowerTwo2Unsigned : CodebookFormat<PowerMap<2, 2, false>> {
  static constexpr const char* kName = "power2_2_unsigned";
};
struct PowerTwo3 : CodebookFormat<PowerMap<2, 3, true>> {
  static constexpr const char* kName = "power2_3";
};
struct PowerTwo3Unsigned : CodebookFormat<PowerMap<2, 3, false>> {
  static constexpr const char* kName = "power2_3_unsigned";
};
struct PowerTwo4 : CodebookFormat<PowerMap<2, 4, true>> {
  static constexpr const char* kName = "power2_4";
};
struct PowerTwo4Unsigned : CodebookFormat<PowerMap<2, 4, false>> {
  static constexpr const char* kName = "power2_4_unsigned";
};
struct PowerTwo5 : CodebookFormat<PowerMap<2, 5, true>> {
  static constexpr const char* kName = "power2_5";
};
struct PowerTwo5Unsigned : CodebookFormat<PowerMap<2, 5, false>> {
  static constexpr const char* kName = "power2_5_unsigned";
};
struct PowerTwo6 : CodebookFormat<PowerMap<2, 6, true>> {
  static constexpr const char* kName = "power2_6";
};
struct PowerTwo6Unsigned : CodebookFormat<PowerMap<2, 6, false>> {
  static constexpr const char* kName = "power2_6_unsigned";
};
struct PowerTwo7 : CodebookFormat<PowerMap<2, 7, true>> {
  static constexpr const char* kName = "power2_7";
};
struct PowerTwo7Unsigned : CodebookFormat<PowerMap<2, 7, false>> {
  static constexpr const char* kName = "power2_7_unsigned";
};
struct PowerTwo8 : CodebookFormat<PowerMap<2, 8, true>> {
  static constexpr const char* kName = "power2_8";
};
struct PowerTwo8Unsigned : CodebookFormat<PowerMap<2, 8, false>> {
  static constexpr const char* kName = "power2_8_unsigned";
};

}  // namespace lowbit
