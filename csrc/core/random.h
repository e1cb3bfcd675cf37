// Random bits as a function of their use: Philox4x32 (Salmon et al., SC11) with 7 rounds.
//
//   key     = (seed low, step)
//   counter = (group low, group high, stream, seed high),  group = global element index / 8
//
// One call serves the 8 elements of a group with 16 bits each. Element e takes word e / 2: the low
// half if e is even, else the high half. `stream` identifies the parameter and is saved with the
// state. The bits of an element therefore do not depend on rank, shard, thread, device or launch
// shape.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

struct RandomKey {
  uint32_t seed_low, seed_high, step, stream;
};

LB_HD constexpr RandomKey random_key(uint64_t seed, uint32_t step, uint32_t stream) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), step, stream};
}

struct Random8 {
  uint32_t word[4];
  /// The 16 bits of element e (0..7) of the group.
  LB_HD uint32_t bits16(int e) const { return (word[e >> 1] >> ((e & 1) * 16)) & 0xffffu; }
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 7;

LB_HD Random8 random8(const RandomKey& key, uint32_t group_low, uint32_t group_high) {
  uint32_t x0 = group_low, x1 = group_high;
  uint32_t x2 = key.stream, x3 = key.seed_high;
  uint32_t k0 = key.seed_low, k1 = key.step;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(kPhiloxM0) * x0;
    const uint64_t b = static_cast<uint64_t>(kPhiloxM1) * x2;
    x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ k0;
    x1 = static_cast<uint32_t>(b);
    x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ k1;
    x3 = static_cast<uint32_t>(a);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{x0, x1, x2, x3}};
}
LB_HD Random8 random8(const RandomKey& key, uint64_t group) {
  return random8(key, static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32));
}

}  // namespace lowbit
