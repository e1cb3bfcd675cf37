// 8-bit codes of the dynamic map of arXiv:2110.02861, with one float32 scale per block of a row.
//
// The map is a float with a unary exponent. Decade i = 0..6 has n = 2^i magnitudes (signed) or
// 2^(i+1) (unsigned), the centers of n equal parts of [0.1, 1] * 10^(i-6). 0 lies below all decades
// and 1 above them:
//     10^(i-6) * (0.1 + 0.9 * (2 j + 1) / (2 n)),  j = 0..n-1
// Magnitudes in ascending order have the ordinals 0 (zero) .. kTop (one). Unsigned: code = ordinal.
// Signed: code = 127 +- ordinal; there is no -1, and -0.99296875 is the lowest value. The entries
// are rounded as torch.linspace rounds them, so their bits are those of the maps of bitsandbytes
// and torchao, and their state relabels without loss.
//
// A code is the nearest entry; a tie goes to the larger value. One exception, unsigned: a positive
// value never becomes zero but the smallest step, because with a second moment of zero the update
// would divide by eps alone.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/scale/block.h"
#include "core/state/boundary.h"

namespace lowbit {

/// kUnsigned = 0: signed, 2^i magnitudes in decade i. kUnsigned = 1: unsigned, 2^(i+1).
template <int kUnsigned>
struct Dynamic8Tables {
  static constexpr int kTop = kUnsigned ? 255 : 128;
  static constexpr int kDecades = 7;
  float magnitude[kTop + 1] = {};
  // The smallest value in decade i or above. [kDecades]: the smallest that becomes one.
  float from[kDecades + 1] = {};
  // Inside decade i the ordinal of a is floor(a * slope + offset), at most `last`, with an error
  // far below kUnsure.
  float slope[kDecades] = {}, offset[kDecades] = {};
  int last[kDecades] = {};

  constexpr Dynamic8Tables() {
    double ten = 1e-6;
    const float tens[kDecades] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    int m = 0;
    magnitude[m++] = 0.0f;
    for (int i = 0; i < kDecades; ++i, ten *= 10.0) {
      const int n = 1 << (i + kUnsigned), first = m;
      for (int j = 0; j < n; ++j) {
        magnitude[m++] = tens[i] * ((point(j, n) + point(j + 1, n)) / 2.0f);
      }
      last[i] = m - 1;
      slope[i] = static_cast<float>(n / (0.9 * ten));
      offset[i] = static_cast<float>(first - n / 9.0);
      from[i] = first_beyond(magnitude[first - 1], magnitude[first]);
    }
    magnitude[m] = 1.0f;
    from[kDecades] = first_beyond(magnitude[m - 1], magnitude[m]);
    if (kUnsigned) from[0] = bits_float(1);  // every positive value
  }

 private:
  /// Point j of n + 1 points from 0.1 to 1, each rounded once (products and sums are exact in
  /// double).
  static constexpr float point(int j, int n) {
    const float h = (1.0f - 0.1f) / static_cast<float>(n);
    return 2 * j < (n + 1) / 2 * 2 ? static_cast<float>(static_cast<double>(h) * j + 0.1f)
                                   : static_cast<float>(1.0 - static_cast<double>(h) * (n - j));
  }
};

/// Constants shared by the vector quantizers. Their lines give ordinals in steps of 2^-16: the
/// upper half of a word is the code, and the lower half tells whether it is certain. A line errs by
/// at most one step for any z (test_kernels checks the neighborhood of every boundary).
template <int kUnsigned>
struct Dynamic8Steps {
  static constexpr float kOne = 65536.0f;
  static constexpr int kUnsure = 8, kRound = 32768 + kUnsure / 2;
  /// A key orders values like |z|. In signed maps the middle between two codes belongs to the upper
  /// one only for z > 0, so the key also has the sign.
  LB_HD static constexpr uint32_t key(uint32_t magnitude, bool positive) {
    return kUnsigned ? magnitude : 2 * magnitude + static_cast<uint32_t>(positive);
  }
  static constexpr int kShift = kUnsigned ? 24 : 25;  // from a key to exponent / 2
  // exponent / 2 of [2^-29, 2^-27), shared by all smaller values.
  static constexpr uint32_t kLowest = 49;
};

template <int kUnsigned>
struct Dynamic8Code {
  using Tables = Dynamic8Tables<kUnsigned>;
  static constexpr const char* kDtype = "uint8";
  static constexpr int kBits = 8, kBlock = 256;
  static constexpr bool kScaled = true;
  static constexpr const char* kDomain = "linear";
  using Storage = uint8_t;
  using Scale = BlockScale;
  /// The next code up or down in value, or the same one at either end. An unsigned code never
  /// becomes zero.
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    constexpr uint32_t kLowest = kUnsigned;
    return up ? (code < 255 ? code + 1 : code) : (code > kLowest ? code - 1 : code);
  }
  static constexpr float kUnsure = 0x1p-12f;

  /// The ordinal of the entry nearest to a >= 0, starting from a guess. Exact: sums of two floats
  /// are exact in double here.
  LB_HD static int nearest(float a, bool negative, int guess, const Tables& t) {
    int m = guess;
    while (m < Tables::kTop && beyond(a, negative, m, t)) ++m;
    while (m > 0 && !beyond(a, negative, m - 1, t)) --m;
    return kUnsigned && m == 0 && a > 0.0f ? 1 : m;
  }

  /// The ordinal of the entry nearest to a >= 0: by arithmetic, or by `nearest` within kUnsure of a
  /// boundary.
  LB_HD static int ordinal(float a, bool negative, const Tables& t) {
    int decade = -1;
    for (int i = 0; i <= Tables::kDecades; ++i) decade += a >= t.from[i];
    if (decade < 0) return 0;
    if (decade == Tables::kDecades)
      return negative && a == t.from[decade] ? nearest(a, negative, Tables::kTop, t) : Tables::kTop;
    const float u = a * t.slope[decade] + t.offset[decade];
    int m = static_cast<int>(u);
    const float within = u - static_cast<float>(m);
    if (m > t.last[decade]) m = t.last[decade];
    if (m < 1) m = 1;  // unsigned values below the first step
    if (within < kUnsure || within > 1.0f - kUnsure || a == t.from[decade])
      m = nearest(a, negative, m, t);
    return m;
  }

 private:
  /// Whether a lies past the middle of the entries m and m + 1. On the middle the larger value
  /// wins: up if positive, down if negative.
  LB_HD static bool beyond(float a, bool negative, int m, const Tables& t) {
    const double twice = 2.0 * a, sum = static_cast<double>(t.magnitude[m]) + t.magnitude[m + 1];
    return negative ? twice > sum : twice >= sum;
  }
};

#if defined(__CUDACC__)
#define LB_TABLE __device__ const
#else
#define LB_TABLE constexpr
#endif
LB_TABLE Dynamic8Tables<0> kDynamic8Tables{};
LB_TABLE Dynamic8Tables<1> kDynamic8UnsignedTables{};

struct Dynamic8 : Dynamic8Code<0> {
  static constexpr const char* kName = "dynamic8";
  static constexpr bool kSigned = true;
  static constexpr uint32_t kZeroCode = 127;

  LB_HD static float dequantize(uint32_t code) {
    const int m = static_cast<int>(code) - 127;
    return m < 0 ? -kDynamic8Tables.magnitude[-m] : kDynamic8Tables.magnitude[m];
  }
  LB_HD static uint32_t quantize(float z) {
    const bool negative = z < 0.0f;
    const int m = ordinal(negative ? -z : z, negative, kDynamic8Tables);
    const int code = negative ? 127 - m : 127 + m;
    return static_cast<uint32_t>(code < 0 ? 0 : code);
  }
};

struct Dynamic8Unsigned : Dynamic8Code<1> {
  static constexpr const char* kName = "dynamic8_unsigned";
  static constexpr bool kSigned = false;
  static constexpr uint32_t kZeroCode = 0;

  LB_HD static float dequantize(uint32_t code) { return kDynamic8UnsignedTables.magnitude[code]; }
  LB_HD static uint32_t quantize(float z) {
    return static_cast<uint32_t>(ordinal(z > 0.0f ? z : 0.0f, false, kDynamic8UnsignedTables));
  }
};

}  // namespace lowbit

#if defined(__CUDACC__)
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "core/state/dynamic8_avx512.h"
#else
#include "core/state/dynamic8_plain.h"
#endif
