// Cautious masks (arXiv:2411.16085): a rule moves only the weights whose update agrees in sign with
// the gradient, the further the fewer they are.
//
//   mask = 1 where u * g > 0, else 0       u: the update before the learning rate; g: the gradient,
//                                          with decay that is added to it
//   p    = p - lr * u * mask / max(mean of mask over the tensor, 0.001)
//
// States move as they would without the mask. The mean counts exactly (exact_sum.h), so it does not
// depend on the sharding.
//
// A rule that can be cautious has
//
//   direction(g, p, s, coef, along)   moves the states, decays p, and returns u; along: g
//   rate(coef)                        the factor of u
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/update/adam.h"
#include "core/update/lion.h"
#include "core/update/rule.h"
#include "core/update/sgd.h"

namespace lowbit {

template <class U>
struct Cautious {
  static constexpr const char* kName = U::kCautiousName;
  static constexpr int kSlots = U::kSlots;
  static constexpr const auto& kSlot = U::kSlot;
  static constexpr int kHypers = U::kHypers;
  static constexpr const auto& kHyper = U::kHyper;
  static constexpr int kRounds = 1;
  LB_HD static constexpr int grid_factor(int) { return -1; }
  LB_HD static constexpr int totals(int) { return 1; }

  struct Coef {
    typename U::Coef of;
    float scale;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    return {U::prepare(hyper, step, g_scale), 1.0f};
  }
  /// x where u * g > 0, else 0. The product itself may underflow.
  LB_HD static float where_agree(float u, float g, float x) {
    return where_same_sign(u, g, x, 0.0f);
  }
  template <int kRound>
  LB_HD static void measure(float g, float p, Values<U>& s, const float*, const Coef& c, float&,
                            float* totals) {
    float along;
    const float u = U::direction(g, p, s, c.of, along);
    totals[0] = where_agree(u, along, 1.0f);
  }
  LB_HD static void finalize(int, const double* totals, double numel, float*, Coef& c) {
    const double mean = totals[0] / numel;
    c.scale = static_cast<float>(1.0 / (mean < 1e-3 ? 1e-3 : mean));
  }
  LB_HD static void update(float g, float& p, Values<U>& s, const Coef& c) {
    float along;
    const float u = U::direction(g, p, s, c.of, along);
    // A product, not a choice: a value that is not finite stays so.
    p = p - U::rate(c.of) * (u * where_agree(u, along, c.scale));
  }
};

}  // namespace lowbit
