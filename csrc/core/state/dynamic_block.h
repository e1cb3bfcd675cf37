// dynamic.h of 5 to 7 bits over many values, by lines: with the same codes as the search.
//
// The place of a magnitude among the entries, ordinal plus share of the way to the next one, is a
// line inside each decade, another one from there to the next decade, and a last one to 1:
// dynamic8_chance.h says why the lower of two lines is the right one. Half the exponent and one
// comparison tell the decade. Places are in steps of 2^-16 and err by less than three of them. The
// nearest code is the place plus one half; within four steps of a boundary the definition decides.
//
// Included by codebook_block.h, where there are vectors, and by nothing else.
#pragma once

namespace lowbit {

/// The lines of a map; segments are decades and the steps before 1.
struct DynamicLines {
  alignas(64) float inside_slope[16] = {}, inside_offset[16] = {};
  alignas(64) float after_slope[16] = {}, after_offset[16] = {};
  alignas(64) float next[16] = {};      // where the next segment begins
  alignas(16) uint8_t begins[16] = {};  // the segment by the low 4 bits of half an exponent
  float zero = 0.0f;                    // the place of z = 0

  static constexpr float kLowest = 0x1p-31f;  // a lower value has the same segment

  template <class Map>
  constexpr explicit DynamicLines(Map) {
    constexpr int kB = Map::kBits, kCodes = Map::kCodes;
    constexpr bool kS = Map::kSigned;
    constexpr int kZero = kS ? kCodes / 2 - 1 : 0, kTop = kCodes - 1 - kZero;
    float value[kCodes] = {};
    Map::fill(value);
    const float* entry = value + kZero;
    zero = kZero * 65536.0f;
    int first = kS ? 0 : 1, last = 0, at = 0;
    for (; at <= kB - 2; ++at) {
      last += 1 << (kS ? at : at + 1);
      line(entry, first, last, inside_slope[at], inside_offset[at]);
      const bool top = at == kB - 2;
      line(entry, top ? first : last, top ? last : last + 1, after_slope[at], after_offset[at]);
      first = last + 1;
      next[at] = entry[top ? last : first];
    }
    line(entry, kTop - 1, kTop, inside_slope[at], inside_offset[at]);
    after_slope[at] = inside_slope[at], after_offset[at] = inside_offset[at];
    next[at] = bits_float(kInfinityBits);
    for (uint32_t e = 0x30; e < 0x40; ++e) {
      uint8_t segment = 0;
      while (bits_float(e << 24) >= next[segment]) ++segment;
      begins[e & 15] = segment;
    }
  }

 private:
  static constexpr void line(const float* entry, int a, int b, float& slope, float& offset) {
    const double x = entry[a], s = 65536.0 * (b - a) / (entry[b] - x);
    slope = static_cast<float>(s), offset = static_cast<float>(65536.0 * a - s * x);
  }
};
template <class Map>
static constexpr DynamicLines kDynamicLines{Map{}};

/// The place of each value among the codes.
template <bool kSigned>
LB_HD Vector::Int dynamic_place(Vector::Float z, const DynamicLines& lines) {
  using V = Vector;
  // NaN stays NaN until it becomes code 0.
  const V::Float a = V::smaller(V::all(1.0f), kSigned ? V::magnitude(z) : z);
  auto at = V::by_half_exponent(lines.begins, V::larger(a, V::all(DynamicLines::kLowest)));
  at = V::next_where(at, V::at_least(a, V::table<3>(lines.next, at)));
  const auto u = V::smaller(
      V::plus_product(a, V::table<3>(lines.inside_slope, at), V::table<3>(lines.inside_offset, at)),
      V::plus_product(a, V::table<3>(lines.after_slope, at), V::table<3>(lines.after_offset, at)));
  if constexpr (kSigned) {  // there is no code -1
    const auto place = V::plus(V::signed_as(u, z), V::all(lines.zero));
    return V::rounded(V::larger(place, V::all(0.0f)));
  }
  // A positive value never becomes zero.
  return V::rounded(V::where_positive(z, V::larger(u, V::all(65536.0f))));
}

/// codes[i] = book.quantize(x[i] * inverse)
template <bool kSigned>
__attribute__((noinline)) static void dynamic_quantize(const float* x, float inverse,
                                                       const DynamicLines& lines,
                                                       const Codebook& book, uint8_t* codes,
                                                       int n) {
  using V = Vector;
  const Codebook of = book;
  quantize_places(x, inverse, of, codes, n, [&](V::Float z) LB_LAMBDA {
    return V::plus(dynamic_place<kSigned>(z, lines), V::all_words(0x8000 + kUnsurePlace / 2));
  });
}

}  // namespace lowbit
