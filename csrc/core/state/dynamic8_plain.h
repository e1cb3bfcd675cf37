// dynamic8.h over many values, in plain loops that compilers vectorise for any instruction set.
//
// encode: eight lines slope * |z| + offset cover all values, and |z| crosses from one to the next
// at a threshold. Without table lookups, each comparison exchanges the line by an exclusive or. The
// value of the line, limited to the line's last ordinal, is cut to the ordinal; next to an integer,
// about once in 2000, the scalar definition is asked.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/state/dynamic8.h"

namespace lowbit {

template <int kExtra>
struct Dynamic8Lines8 {
  using Tables = Dynamic8Tables<kExtra>;
  static constexpr int kLines = 8;
  alignas(32) uint32_t slope[kLines] = {}, offset[kLines] = {},
                       last[kLines] = {};  // bits of floats
  int32_t threshold[kLines] = {};          // of keys, for the line and those above

  LB_HD static constexpr int32_t key(uint32_t magnitude, bool positive) {
    return static_cast<int32_t>(Dynamic8Steps<kExtra>::key(magnitude, positive));
  }

  constexpr explicit Dynamic8Lines8(const Tables& t) {
    // Zero and one, or one and two, change at their middle, halfway up from the line's start.
    const float middle = kExtra ? (t.magnitude[1] + t.magnitude[2]) / 2.0f : t.from[0];
    set(0, 0.5f / middle, kExtra + 0.5f, static_cast<float>(t.last[0]) + 0.5f);
    for (int i = 1; i < Tables::kDecades; ++i)
      set(i, t.slope[i], t.offset[i], static_cast<float>(t.last[i]) + 0.5f);
    set(Tables::kDecades, 0.0f, Tables::kTop + 0.5f, Tables::kTop + 0.5f);
    for (int i = 1; i < kLines; ++i) {
      const int below = i < Tables::kDecades ? t.last[i - 1] : Tables::kTop - 1;
      const bool tie =
          2.0 * t.from[i] == static_cast<double>(t.magnitude[below]) + t.magnitude[below + 1];
      threshold[i] = key(float_bits(t.from[i]), tie);
    }
  }

 private:
  constexpr void set(int i, float s, float o, float l) {
    slope[i] = float_bits(s), offset[i] = float_bits(o), last[i] = float_bits(l);
  }
};

constexpr Dynamic8Lines8<0> kDynamic8Lines{Dynamic8Tables<0>{}};
constexpr Dynamic8Lines8<1> kDynamic8UnsignedLines{Dynamic8Tables<1>{}};

/// The ordinal's guess of a >= 0, and how far above it the line is.
template <int kExtra>
LB_HD int32_t dynamic8_guess(float a, bool positive, const Dynamic8Lines8<kExtra>& lines,
                             float* above) {
  const int32_t key = lines.key(float_bits(a), positive);
  uint32_t slope = lines.slope[0], offset = lines.offset[0], last = lines.last[0];
  for (int i = 1; i < lines.kLines; ++i) {
    const uint32_t reached = -static_cast<uint32_t>(key >= lines.threshold[i]);
    slope ^= reached & (lines.slope[i] ^ lines.slope[i - 1]);
    offset ^= reached & (lines.offset[i] ^ lines.offset[i - 1]);
    last ^= reached & (lines.last[i] ^ lines.last[i - 1]);
  }
  const float u = a * bits_float(slope) + bits_float(offset), most = bits_float(last);
  const float limited = u < most ? u : most;
  const int32_t m = static_cast<int32_t>(limited);
  *above = limited - static_cast<float>(m);
  return m;
}

/// codes[i] = Format::encode(x[i] * inverse)
template <class Format>
LB_HD void encode_turns(const float* x, float inverse, uint8_t* codes, int n) {
  constexpr int kTurn = 64;
  for (int begin = 0; begin < n; begin += kTurn, x += kTurn, codes += kTurn) {
    const int count = n - begin < kTurn ? n - begin : kTurn;
    int32_t code[kTurn], unsure[kTurn], any = 0;
    for (int i = 0; i < count; ++i) {
      const float z = x[i] * inverse;
      float above;
      if constexpr (Format::kSigned) {
        const bool negative = z < 0.0f;
        const int32_t m =
            dynamic8_guess(bits_float(magnitude_bits(z)), !negative, kDynamic8Lines, &above);
        const int32_t c = negative ? 127 - m : 127 + m;
        code[i] = c < 0 ? 0 : c;
      } else {
        const int32_t m = dynamic8_guess(z > 0.0f ? z : 0.0f, true, kDynamic8UnsignedLines, &above);
        code[i] = z > 0.0f ? m : 0;
      }
      unsure[i] = static_cast<int32_t>(above < Format::kUnsure) |
                  static_cast<int32_t>(above > 1.0f - Format::kUnsure);
      any |= unsure[i];
    }
    for (int i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(code[i]);
    if (any == 0) continue;
    for (int i = 0; i < count; ++i) {
      if (unsure[i] != 0) codes[i] = static_cast<uint8_t>(Format::encode(x[i] * inverse));
    }
  }
}

#if !defined(__AVX2__)
LB_HD void encode_block(Dynamic8, const float* x, const BlockScale& s, uint8_t* codes, int n) {
  encode_turns<Dynamic8>(x, s.inverse, codes, n);
}
LB_HD void encode_block(Dynamic8Unsigned, const float* x, const BlockScale& s, uint8_t* codes,
                        int n) {
  encode_turns<Dynamic8Unsigned>(x, s.inverse, codes, n);
}
#endif

/// One lookup a value: the map itself, with its signs.
struct Dynamic8Values {
  float of[256] = {};
  constexpr explicit Dynamic8Values(const Dynamic8Tables<0>& t) {
    for (int code = 0; code < 256; ++code)
      of[code] = code < 127 ? -t.magnitude[127 - code] : t.magnitude[code - 127];
  }
};
constexpr Dynamic8Values kDynamic8Values{Dynamic8Tables<0>{}};

/// Several at a time by hand: left to themselves, compilers move codes into vectors and out of them
/// again.
LB_HD void decode_by_table(const float* map, const uint8_t* codes, float scale, float* out, int n) {
  int i = 0;
#if defined(__SSE2__)
  const __m128 scales = _mm_set1_ps(scale);
  const auto two = [&](int at) {
    return _mm_unpacklo_ps(_mm_load_ss(map + codes[at]), _mm_load_ss(map + codes[at + 1]));
  };
  for (; i + 4 <= n; i += 4)
    _mm_storeu_ps(out + i, _mm_mul_ps(_mm_movelh_ps(two(i), two(i + 2)), scales));
#else
  for (; i + 8 <= n; i += 8) {
    const float v[8] = {map[codes[i]],     map[codes[i + 1]], map[codes[i + 2]], map[codes[i + 3]],
                        map[codes[i + 4]], map[codes[i + 5]], map[codes[i + 6]], map[codes[i + 7]]};
    for (int j = 0; j < 8; ++j) out[i + j] = v[j] * scale;
  }
#endif
  for (; i < n; ++i) out[i] = map[codes[i]] * scale;
}

LB_HD void decode_block(Dynamic8, const uint8_t* codes, const BlockScale& s, float* out, int n) {
  decode_by_table(kDynamic8Values.of, codes, s.scale, out, n);
}
LB_HD void decode_block(Dynamic8Unsigned, const uint8_t* codes, const BlockScale& s, float* out,
                        int n) {
  decode_by_table(kDynamic8UnsignedTables.magnitude, codes, s.scale, out, n);
}

}  // namespace lowbit

#if defined(__AVX2__) && defined(__FMA__)
#include "core/state/dynamic8_avx2.h"
#endif
