// The random projection P of APOLLO: entries N(0, 1) / sqrt(rank), a function of the seed, the
// refresh number and the position in the whole matrix. P is not part of the saved state.
//
// P maps the shorter side of a gradient, R x C, to `rank`:
//   R >= C:  L = G P,    [R, rank]
//   R < C:   L = P^T G,  [rank, C]
// In both cases P is stored as P[a][k], a < min(R, C), k < rank (the paper writes the transpose
// where R >= C). Entry (a, k) is element e = a * rank + k of the random stream: word e mod 4 of the
// Philox call with counter e / 4. A rank with the rows [a, b) of a gradient with R < C therefore
// generates only the rows [a, b) of P.
#pragma once

#include <cstdint>

#include "core/lowrank/normal.h"
#include "core/macros.h"
#include "core/random.h"

namespace lowbit {

struct ProjectionKey {
  RandomKey key;
  int64_t rank;
  double scale;  // 1 / sqrt(rank)
};

/// The domain that separates these draws from those of stochastic rounding, where step = refresh.
constexpr uint32_t kProjectionDomain = 0x70726f6au;

LB_HD ProjectionKey projection_key(uint64_t seed, uint32_t refresh, uint32_t stream, int64_t rank) {
  const uint32_t high = static_cast<uint32_t>(seed >> 32) ^ kProjectionDomain;
  return {{static_cast<uint32_t>(seed), high, refresh, stream},
          rank,
          1.0 / __builtin_sqrt(static_cast<double>(rank))};
}

LB_HD float projection_entry(const ProjectionKey& p, uint64_t element) {
  return static_cast<float>(normal(random8(p.key, element >> 2).word[element & 3]) * p.scale);
}

/// Writes the elements [begin, end), four per Philox call.
LB_HD void projection_entries(const ProjectionKey& p, uint64_t begin, uint64_t end, float* out) {
  for (uint64_t element = begin; element < end;) {
    const Random8 r = random8(p.key, element >> 2);
    do {
      *out++ = static_cast<float>(normal(r.word[element & 3]) * p.scale);
      ++element;
    } while (element < end && (element & 3) != 0);
  }
}

/// The smallest n with |x| <= 2^n, for a finite x other than 0.
LB_HD constexpr int exponent_above(double x) {
  const uint64_t bits = __builtin_bit_cast(uint64_t, x) & 0x7fffffffffffffffull;
  const int exponent = static_cast<int>(bits >> 52) - 1023;
  return exponent + ((bits & 0xfffffffffffffull) != 0 ? 1 : 0);
}

/// n with |P[a][k]| <= 2^n for this generator. For any other P use exponent_above of the largest
/// magnitude it can have on any rank.
LB_HD int projection_exponent(const ProjectionKey& p) {
  return exponent_above(kNormalBound * p.scale);
}

}  // namespace lowbit
