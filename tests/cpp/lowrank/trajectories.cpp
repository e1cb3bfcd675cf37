// APOLLO and Fira against the trajectories of tests/golden/lowrank.bin, which
// tests/support/peers/lowrank.py describes: one rank and several.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "check.h"
#include "core/update/apollo.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/matrices/subspace.h"
#include "lowrank/lowrank.h"

using namespace lowbit;

namespace {

struct Case {
  const char* name;
  int64_t rows, cols;
  bool fira;
  int64_t rank;
  bool tensor;
  double scale;
  bool front;
};
constexpr Case kCases[] = {{"apollo_ch", 16, 256, false, 8, false, 1.0, false},
                           {"apollo_tall_ch", 96, 64, false, 8, false, 1.0, false},
                           {"fira", 16, 256, true, 8, false, 0.25, false},
                           {"mini_front", 16, 256, false, 1, true, 128.0, true},
                           {"mini_tall", 96, 64, false, 1, true, 128.0, false},
                           {"fira_tall", 96, 64, true, 8, false, 0.25, false}};

/// Runs a case with its rows on `ranks` ranks and returns the parameter. `limit` receives the norm
/// of the limiter.
std::vector<float> run_case(const Case& c, const std::vector<const float*>& in, int64_t ranks,
                            double& limit) {
  const bool tall = c.rows >= c.cols;
  const int64_t small = std::min(c.rows, c.cols), large = std::max(c.rows, c.cols), rank = c.rank;
  const double lr = 1e-2, decay = 0.1, hyper[4] = {lr, 0.9, 0.999, 1e-6};
  std::vector<float> p(in[0], in[0] + c.rows * c.cols), low(static_cast<size_t>(large * rank)),
      n(low.size()), m(low.size()), v(low.size()), s(static_cast<size_t>(large)),
      residual(p.size());
  const auto range = [&](int64_t r, int64_t of) { return r * of / ranks; };
  limit = 0.0;
  for (int64_t step = 1; step <= 4; ++step) {
    const cpu::GradRows g{in[static_cast<size_t>(step)], 0, c.rows, c.cols, 1.0f};
    const float* projection = in[step <= 2 ? 5 : 6];
    if (tall) {
      for (int64_t r = 0; r < ranks; ++r)
        cpu::project_rows(g, projection, rank, range(r, c.rows), range(r + 1, c.rows), low.data());
    } else {
      float bound = 0.0f;
      for (int64_t e = 0; e < small * rank; ++e) bound = std::max(bound, std::fabs(projection[e]));
      const int exponent = exponent_above(bound);
      std::vector<int32_t> absmax(static_cast<size_t>(c.cols)), part_absmax(absmax.size());
      std::vector<int64_t> sums(low.size()), part(low.size());
      const auto local = [&](int64_t r) {
        return cpu::GradRows{in[static_cast<size_t>(step)] + range(r, c.rows) * c.cols, 0,
                             range(r + 1, c.rows) - range(r, c.rows), c.cols, 1.0f};
      };
      for (int64_t r = 0; r < ranks; ++r) {
        cpu::column_absmax(local(r), 0, c.cols, part_absmax.data());
        for (size_t j = 0; j < absmax.size(); ++j) absmax[j] = std::max(absmax[j], part_absmax[j]);
      }
      for (int64_t r = 0; r < ranks; ++r) {
        cpu::project_columns(local(r), projection + range(r, c.rows) * rank, rank, exponent,
                             absmax.data(), 0, c.cols, part.data());
        for (size_t j = 0; j < sums.size(); ++j) sums[j] += part[j];
      }
      cpu::column_values(sums.data(), absmax.data(), rank, c.cols, exponent, 0, c.cols, low.data());
    }
    const auto inner = ApolloInner::prepare(hyper, step, 1.0);
    for (size_t e = 0; e < low.size(); ++e) {
      float state[2] = {m[e], v[e]};
      ApolloInner::update(low[e], n[e], state, inner);
      m[e] = state[0], v[e] = state[1];
    }
    cpu::Scales scales{s.data(), c.tensor ? cpu::Channel::kTensor
                                 : tall   ? cpu::Channel::kRow
                                          : cpu::Channel::kColumn};
    if (c.tensor) {
      Words a, b;
      cpu::add_squares(n.data(), 0, large * rank, a.word);
      cpu::add_squares(low.data(), 0, large * rank, b.word);
      s[0] = norm_ratio(a.value(), b.value());
    } else if (tall) {
      cpu::row_scales(n.data(), low.data(), rank, 0, large, s.data());
    } else {
      cpu::column_scales(n.data(), low.data(), rank, c.cols, 0, large, s.data());
    }
    Scaling scaling;
    const float root = static_cast<float>(std::sqrt(c.scale));
    if (!c.fira) (c.front ? scaling.front : scaling.after) = root;
    if (c.fira) scaling.alpha = static_cast<float>(c.scale);
    scaling.eta = static_cast<float>(bias_corrected(lr, 0.9, 0.999, step));
    scaling.decay = static_cast<float>(lr * decay);
    Words norm;
    for (int64_t r = 0; r < ranks; ++r) {
      Words w;
      if (c.fira) {
        cpu::fira_norm(g, low.data(), projection, rank, tall, scales, scaling, range(r, c.rows),
                       range(r + 1, c.rows), residual.data(), w.word);
      } else {
        cpu::apollo_norm(g, scales, scaling, range(r, c.rows), range(r + 1, c.rows), w.word);
      }
      exact_merge(w.word, norm.word);
    }
    scaling.divisor = static_cast<float>(Limiter{}.divisor(std::sqrt(norm.value()), limit));
    const cpu::ParamRows param{p.data(), nullptr, 0, 0, {}};
    for (int64_t r = 0; r < ranks; ++r) {
      if (c.fira) {
        cpu::fira_step(g, n.data(), projection, rank, tall, scaling, residual.data(), param,
                       range(r, c.rows), range(r + 1, c.rows));
      } else {
        cpu::apollo_step(g, scales, scaling, param, range(r, c.rows), range(r + 1, c.rows));
      }
    }
  }
  return p;
}

/// With our own singular vectors. The reference's are in float32 and off by about 1e-5, which moves
/// p by 2e-6.
void check_own_projection(const std::string& isa, const Case& c, std::vector<const float*> in,
                          const float* p4) {
  const bool tall = c.rows >= c.cols;
  const int64_t n = std::min(c.rows, c.cols);
  std::vector<double> a(static_cast<size_t>(n * n));
  std::vector<float> own(static_cast<size_t>(n * c.rank));
  cpu::gram({in[1], 0, c.rows, c.cols, 1.0f}, tall, 0, n, a.data());
  cpu::leading_vectors(a.data(), n, c.rank, own.data());
  in[5] = in[6] = own.data();
  double limit, worst = 0.0;
  const auto p = run_case(c, in, 1, limit);
  for (size_t e = 0; e < p.size(); ++e)
    worst = std::max(worst, std::fabs(static_cast<double>(p[e]) - p4[e]));
  check(worst <= 2e-6,
        isa + " " + c.name + " with our vectors: " + std::to_string(worst * 1e6) + "e-6");
}

}  // namespace

void check_trajectories(const std::string& isa, std::vector<std::vector<float>>& first) {
  std::FILE* file = std::fopen(LOWBIT_GOLDEN "/lowrank.bin", "rb");
  check(file != nullptr, "lowrank.bin");
  if (file == nullptr) return;
  std::vector<float> data(1 << 20);
  data.resize(std::fread(data.data(), 4, data.size(), file));
  std::fclose(file);
  const float* at = data.data();
  std::vector<const float*> inputs[2];
  for (int tall = 0; tall < 2; ++tall) {
    for (int k = 0; k < 5; ++k, at += tall ? 96 * 64 : 16 * 256) inputs[tall].push_back(at);
  }
  for (size_t i = 0; i < std::size(kCases); ++i) {
    const Case& c = kCases[i];
    auto in = inputs[c.rows >= c.cols];
    const int64_t small = std::min(c.rows, c.cols) * c.rank, size = c.rows * c.cols,
                  low = std::max(c.rows, c.cols) * c.rank;
    in.push_back(at), at += small;
    in.push_back(at), at += small;
    const float *p4 = at, norm = at[size + 2 * low];
    at += size + 2 * low + 1;
    double limit;
    const auto p = run_case(c, in, 1, limit);
    double worst = 0.0;
    for (int64_t e = 0; e < size; ++e)
      worst = std::max(worst, std::fabs(static_cast<double>(p[static_cast<size_t>(e)]) - p4[e]));
    check(worst <= 5e-7,
          isa + " " + c.name + ": " + std::to_string(worst * 1e6) + "e-6 from the peer");
    check(std::fabs(limit - norm) <= 1e-6 * norm, isa + " " + c.name + " limiter");
    for (const int64_t ranks : {2, 3, 7}) {
      double other;
      check(same(p, run_case(c, in, ranks, other)) && other == limit,
            isa + " " + c.name + " on ranks");
    }
    if (first.size() <= i) first.push_back(p);
    check(same(p, first[i]), isa + " " + c.name + " against the baseline");
    if (c.fira) check_own_projection(isa, c, in, p4);
  }
  check(at == data.data() + data.size(), "lowrank.bin is read to its end");
}
