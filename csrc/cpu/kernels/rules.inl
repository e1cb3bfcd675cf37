// The kernels of update rules, for the rules_ISA.cpp, which define LOWBIT_RULES. As values.inl.
#include <cstring>

#include "core/update/registry.h"
#include "cpu/kernels.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/random.h"

namespace lowbit::cpu {
namespace {

template <class U>
LB_HD void update_run(const float* __restrict g, float* __restrict p, float* __restrict s0,
                      float* __restrict s1, float* __restrict s2, float* __restrict s3,
                      const float* const* f, int n, const typename U::Coef& c) {
  static_assert(U::kSlots <= 4 && kMaxSlots == 4 && kMaxFactors == 2);
  constexpr int kF = 2 * factors_of<U>();
  const float* __restrict f0 = kF > 0 ? f[0] : nullptr;
  const float* __restrict f1 = kF > 0 ? f[1] : nullptr;
  const float* __restrict f2 = kF > 2 ? f[2] : nullptr;
  const float* __restrict f3 = kF > 2 ? f[3] : nullptr;
  for (int i = 0; i < n; ++i) {
    Values<U> state{};
    if constexpr (U::kSlots > 0) state[0] = s0[i];
    if constexpr (U::kSlots > 1) state[1] = s1[i];
    if constexpr (U::kSlots > 2) state[2] = s2[i];
    if constexpr (U::kSlots > 3) state[3] = s3[i];
    float factor[4] = {};
    if constexpr (kF > 0) factor[0] = f0[i], factor[1] = f1[i];
    if constexpr (kF > 2) factor[2] = f2[i], factor[3] = f3[i];
    float pi = p[i];
    update_element<U>(g[i], pi, state, factor, c);
    p[i] = pi;
    if constexpr (U::kSlots > 0) s0[i] = state[0];
    if constexpr (U::kSlots > 1) s1[i] = state[1];
    if constexpr (U::kSlots > 2) s2[i] = state[2];
    if constexpr (U::kSlots > 3) s3[i] = state[3];
  }
}

void absmax_of_run(const float* __restrict x, float* __restrict absmax) {
  for (int j = 0; j < kMaxLanes; ++j) {
    int32_t m = signed_magnitude(x[j]);
    for (int i = j + kMaxLanes; i < kMaxRun; i += kMaxLanes) {
      const int32_t b = signed_magnitude(x[i]);
      m = b > m ? b : m;
    }
    absmax[j] = bits_float(static_cast<uint32_t>(m));
  }
}

template <class U>
void update(const float* g, float* p, float* const* s, const float* const* f, int n,
            const void* coef, const Draw* draw, float* absmax) {
  typename U::Coef c;
  std::memcpy(&c, coef, sizeof c);
  float* const s0 = s[0];
  float* const s1 = U::kSlots > 1 ? s[1] : s0;
  float* const s2 = U::kSlots > 2 ? s[2] : s0;
  float* const s3 = U::kSlots > 3 ? s[3] : s0;
  int i = 0;
  if constexpr (factors_of<U>() == 0) {
    constexpr int kPart = 8 * Drawing::kGroups;
    static_assert(kMaxRun % kPart == 0);
    const auto run = [&](auto between) {
      const int begin = i;
      for (; i < begin + kMaxRun; i += kPart) {
        between();
        update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, s3 + i, nullptr, kPart, c);
      }
      if (absmax == nullptr) return;
      float* at = absmax + begin / kMaxRun * kMaxLanes;
      for (int k = 0; k < U::kSlots; ++k) absmax_of_run(s[k] + begin, at + k * kMaxOfSlot);
    };
    if (draw != nullptr) {
      Drawing drawing(*draw);
      while (i + kMaxRun <= n && drawing.more()) run([&] { drawing.next(); });
      drawing.finish();
    }
    while (i + kMaxRun <= n) run([] {});
  } else if (draw != nullptr) {
    Drawing(*draw).finish();
  }
  update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, s3 + i, f, n - i, c);
}

template <class U, int kRound>
void measure_round(const float* __restrict g, const float* __restrict p, const float* const* s,
                   const float* const* f, int n, const typename U::Coef& coef,
                   float* __restrict grid, float* const* totals) {
  static_assert(kMaxTotals == 2);
  constexpr int kF = 2 * factors_of<U>();
  const typename U::Coef c = coef;  // a local copy, which the stores below cannot alias
  const float* __restrict s0 = U::kSlots > 0 ? s[0] : nullptr;
  const float* __restrict s1 = U::kSlots > 1 ? s[1] : nullptr;
  const float* __restrict s2 = U::kSlots > 2 ? s[2] : nullptr;
  const float* __restrict s3 = U::kSlots > 3 ? s[3] : nullptr;
  const float* __restrict f0 = kF > 0 ? f[0] : nullptr;
  const float* __restrict f1 = kF > 0 ? f[1] : nullptr;
  const float* __restrict f2 = kF > 2 ? f[2] : nullptr;
  const float* __restrict f3 = kF > 2 ? f[3] : nullptr;
  float* __restrict total0 = totals[0];
  float* __restrict total1 = totals[1];
  for (int i = 0; i < n; ++i) {
    Values<U> state{};
    if constexpr (U::kSlots > 0) state[0] = s0[i];
    if constexpr (U::kSlots > 1) state[1] = s1[i];
    if constexpr (U::kSlots > 2) state[2] = s2[i];
    if constexpr (U::kSlots > 3) state[3] = s3[i];
    float factor[4] = {};
    if constexpr (kF > 0) factor[0] = f0[i], factor[1] = f1[i];
    if constexpr (kF > 2) factor[2] = f2[i], factor[3] = f3[i];
    float x = 0.0f, sum[kMaxTotals] = {};
    U::template measure<kRound>(g[i], p[i], state, factor, c, x, sum);
    if constexpr (U::grid_factor(kRound) >= 0) grid[i] = x;
    if constexpr (U::totals(kRound) > 0) total0[i] = sum[0];
    if constexpr (U::totals(kRound) > 1) total1[i] = sum[1];
  }
}

template <class U>
void measure(int round, const float* g, const float* p, const float* const* s,
             const float* const* f, int n, const void* coef, float* grid, float* const* totals) {
  static_assert(rounds_of<U>() <= 3);
  typename U::Coef c;
  std::memcpy(&c, coef, sizeof c);
  if (round == 0) measure_round<U, 0>(g, p, s, f, n, c, grid, totals);
  if constexpr (rounds_of<U>() > 1) {
    if (round == 1) measure_round<U, 1>(g, p, s, f, n, c, grid, totals);
  }
  if constexpr (rounds_of<U>() > 2) {
    if (round == 2) measure_round<U, 2>(g, p, s, f, n, c, grid, totals);
  }
}

// ---- the table ----

template <class U>
constexpr void fill_rule(RuleKernels& l, int i) {
  l.update[i] = update<U>;
  if constexpr (rounds_of<U>() > 0) l.measure[i] = measure<U>;
}
template <class... U>
constexpr void fill_rules(RuleKernels& l, Types<U...>) {
  int i = 0;
  (fill_rule<U>(l, i++), ...);
}

constexpr RuleKernels make_rules() {
  static_assert(UpdateRules::kCount <= kMaxKernels);
  RuleKernels l{};
  fill_rules(l, UpdateRules{});
  return l;
}

}  // namespace

constinit const RuleKernels LOWBIT_RULES = make_rules();

}  // namespace lowbit::cpu
