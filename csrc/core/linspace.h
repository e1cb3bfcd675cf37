// Evenly spaced points with the rounding of torch.linspace: counted from the nearer end, the step
// rounded once, every point rounded once (product and sum are exact in double). For compile time
// only.
#pragma once

namespace lowbit {

/// Point i of `points` points from a to b.
constexpr float linspace(float a, float b, int points, int i) {
  const float step = (b - a) / static_cast<float>(points - 1);
  return i < points / 2 ? static_cast<float>(static_cast<double>(step) * i + a)
                        : static_cast<float>(b - static_cast<double>(step) * (points - 1 - i));
}

}  // namespace lowbit
