// Loops over many values for quantizers that take a fixed number of them at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace lowbit {

/// turn(x, codes) for every kTurn values; the last ones are quantized in a copy.
template <int kTurn, class Turn>
LB_HD void in_turns(const float* x, uint8_t* codes, int n, const Turn& turn) {
  int i = 0;
  for (; i + kTurn <= n; i += kTurn) turn(x + i, codes + i);
  if (i == n) return;
  const auto left = static_cast<size_t>(n - i);
  float rest[kTurn] = {};
  uint8_t coded[kTurn];
  std::memcpy(rest, x + i, left * sizeof(float));
  turn(rest, coded);
  std::memcpy(codes + i, coded, left);
}

/// The same with 16 random bits for each value: turn(x, random16, codes).
template <int kTurn, class Turn>
LB_HD void in_turns(const float* x, const uint16_t* random16, uint8_t* codes, int n,
                    const Turn& turn) {
  int i = 0;
  for (; i + kTurn <= n; i += kTurn) turn(x + i, random16 + i, codes + i);
  if (i == n) return;
  const auto left = static_cast<size_t>(n - i);
  float rest[kTurn] = {};
  uint16_t chance[kTurn] = {};
  uint8_t coded[kTurn];
  std::memcpy(rest, x + i, left * sizeof(float));
  std::memcpy(chance, random16 + i, left * sizeof(uint16_t));
  turn(rest, chance, coded);
  std::memcpy(codes + i, coded, left);
}

}  // namespace lowbit
