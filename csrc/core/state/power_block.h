// power.h of 5 to 8 bits over many values, by arithmetic: with the same codes and values.
//
// Entry j from the smallest magnitude has the root (j + a) / A, where
//
//   unsigned   a = 1     A = 2^B             entries 0, 1, ... are codes 0, 1, ...
//   signed     a = 1/2   A = (2^B - 1) / 2   they are codes h, h + 1, ... and h - 1, h - 2, ...,
//                                            h = 2^(B-1)
//
// and u = |z| A^p is a magnitude in units in which entry j is (j + a)^p.
//
// quantize, p = 2: entries j - 1 and j have the middle (j + a - 1/2)^2 + 1/4, so that
//
//   j = floor(sqrt(u - 1/4) - a + 1/2)       p = 1: floor(u - a + 1/2)
//
// in steps of 2^-16, as codebook_block.h does with evenly spaced codes: errors of the root, of the
// conversion and of the entries themselves, which are rounded, are less than three steps. Within
// four of a boundary the search decides. All of entry 0 lies half a code from a boundary: no zero
// is unsure.
//
// Included by codebook_block.h, where there are vectors, and by nothing else.
#pragma once

namespace lowbit {

/// The numbers of a map; u = |z| scale.
struct PowerLine {
  float scale, last;  // of codes
  float half;         // A
  Codebook book;
};

template <int kPower, bool kSigned>
struct PowerNearest {
  using V = Vector;

  /// Words whose upper halves are the codes. A value is unsure where the lower half is below
  /// kUnsurePlace.
  LB_HD static V::Int words(V::Float z, const PowerLine& line) {
    constexpr float kA = kSigned ? 0.5f : 1.0f, kStep = 65536.0f;
    const V::Float m = kSigned ? V::magnitude(z) : z;
    V::Float root;  // NaN stays NaN, whose word is unsure
    if constexpr (kPower == 1) {
      root = V::times(m, V::all(line.scale));
    } else {
      root = V::root(
          V::larger(V::all(kA * kA), V::product_minus(m, V::all(line.scale), V::all(0.25f))));
    }
    root = V::larger(V::all(kA), V::smaller(V::all(line.half), root));
    if constexpr (kSigned) {
      root = V::choose(V::at_least(z, V::all(0.0f)), V::minus(V::all(0.0f), root), root);
      const float middle = (line.last + 1.0f) / 2;
      return V::rounded(
          V::plus_product(root, V::all(kStep), V::all(middle * kStep + kUnsurePlace / 2)));
    }
    return V::rounded(V::plus_product(root, V::all(kStep), V::all(kUnsurePlace / 2 - kStep / 2)));
  }
};

/// codes[i] = book.quantize(x[i] * inverse)
template <int kPower, bool kSigned>
__attribute__((noinline)) static void power_quantize(const float* x, float inverse,
                                                     const PowerLine& line, uint8_t* codes, int n) {
  const PowerLine of = line;
  quantize_places(x, inverse, of.book, codes, n, [&](Vector::Float z) LB_LAMBDA {
    return PowerNearest<kPower, kSigned>::words(z, of);
  });
}

/// out[i] = value[codes[i]] * scale, with the roundings of PowerMap::fill.
template <int kPower, bool kSigned>
__attribute__((noinline)) static void power_dequantize(const uint8_t* codes, const PowerLine& line,
                                                       float scale, float* out, int n) {
  using V = Vector;
  const auto all = V::all(scale), one = V::all(1.0f);
  const auto last = V::all(line.last), step = V::all(2.0f / line.last);
  const PowerLine of = line;
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const auto code = V::to_float(V::load_bytes(codes + i));
    typename V::Float value;
    if constexpr (kSigned) {
      const auto from_end = V::smaller(code, V::minus(last, code));
      const auto root = V::minus_product(step, from_end, one);
      value = kPower == 1 ? root : V::times(root, root);
      const auto middle = V::all(of.last / 2);
      value = V::choose(V::at_least(code, middle), V::minus(V::all(0.0f), value), value);
    } else {
      const auto root = V::times(V::plus(code, one), V::all(1.0f / of.half));
      value = kPower == 1 ? root : V::times(root, root);
    }
    V::store(out + i, V::times(value, all));
  }
  for (; i < n; ++i) out[i] = of.book.value[codes[i]] * scale;
}

template <class F>
LB_HD PowerLine power_line() {
  constexpr float kLast = F::kCodes - 1;
  constexpr float kHalf = F::kSigned ? kLast / 2 : kLast + 1.0f;
  return {F::Map::kPower == 1 ? kHalf : kHalf * kHalf, kLast, kHalf, F::book()};
}

}  // namespace lowbit
