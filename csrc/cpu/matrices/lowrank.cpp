#include "cpu/matrices/lowrank.h"

#include <cstring>
#include <string_view>
#include <vector>

#include "catalog/catalog.h"
#include "cpu/matrices/product.h"
#include "cpu/step.h"

namespace lowbit::cpu {
namespace {

using K = LowRankKernels;

/// The scales of n elements of row i, one per element.
const float* spread(Scales s, int64_t i, int64_t col, int n, float* room) {
  if (s.channel == Channel::kColumn) return s.s + col;
  const float value = s.s[s.channel == Channel::kRow ? i : 0];
  for (int j = 0; j < n; ++j) room[j] = value;
  return room;
}

/// p = applied(p, u) for n elements of row i.
void step_tile(const ParamRows& param, int64_t cols, int64_t i, int64_t col, int n,
               const Scaling& c, const float* u) {
  const Kernels& kernel = kernels();
  float p[kTile];
  uint16_t random16[kTile + 8 + 7 * 8];
  const int64_t local = i * cols + col;
  char* const at = static_cast<char*>(param.data) + local * param_info(param.format).bytes;
  const ParamInfo info = param_info(param.format);
  char* const compensation =
      param.compensation != nullptr
          ? static_cast<char*>(param.compensation) + local * info.compensation_bytes
          : nullptr;
  kernel.load_param[param.format](at, compensation, p, n);
  lowrank_kernels().applied(u, c, p, n);
  const uint64_t index = static_cast<uint64_t>(param.first + local);
  const int skip = static_cast<int>(index & 7);
  if (info.random) kernel.draw({param.random, index >> 3, (skip + n + 7) / 8, random16});
  kernel.store_param[param.format](p, at, compensation, n, random16 + skip);
}

}  // namespace

const LowRankKernels& lowrank_kernels() {
  [[maybe_unused]] const std::string_view isa = kernels().isa;
#if defined(LOWBIT_AVX512)
  if (isa.starts_with(kLowRankAvx512.isa)) return kLowRankAvx512;  // byte permutes do not help here
#endif
#if defined(LOWBIT_AVX2)
  if (isa == kLowRankAvx2.isa) return kLowRankAvx2;
#endif
  return kLowRankBaseline;
}

void load(const GradRows& g, int64_t i, int64_t col, int n, float* out) {
  const int64_t at = (i * g.cols + col) * grad_bytes(g.format);
  kernels().load_grad[g.format](static_cast<const char*>(g.data) + at, out, n);
  lowrank_kernels().scale(out, n, g.scale);
}

void make_projection(const ProjectionKey& key, int64_t begin, int64_t end, float* p) {
  lowrank_kernels().projection(key, static_cast<uint64_t>(begin * key.rank),
                               static_cast<uint64_t>(end * key.rank), p);
}

void project_rows(const GradRows& g, const float* p, int64_t rank, int64_t begin, int64_t end,
                  float* low) {
  product([&](int64_t i, int64_t c, int n, float* out) { load(g, i, c, n, out); }, p, rank, 1,
          g.cols, rank, begin, end, low);
}

void column_absmax(const GradRows& g, int64_t begin, int64_t end, int32_t* absmax) {
  const Kernels& kernel = kernels();
  for (int64_t j = begin; j < end; ++j) absmax[j] = 0;
  for (int64_t i = 0; i < g.rows; ++i) {
    for (int64_t col = begin; col < end; col += kTile) {
      float x[kTile];
      const int n = length(col, end, kTile);
      load(g, i, col, n, x);
      kernel.absmax(x, n, reinterpret_cast<uint32_t*>(absmax + col));
    }
  }
}

void project_columns(const GradRows& g, const float* p, int64_t rank, int projection_exponent,
                     const int32_t* absmax, int64_t begin, int64_t end, int64_t* sums) {
  const K& kernel = lowrank_kernels();
  const size_t strip = static_cast<size_t>(rank) * K::kStrip;
  std::vector<double> converted(K::kDepth * K::kStrip),
      factors(static_cast<size_t>(K::kDepth * rank)), partial(strip);
  for (int64_t col = begin; col < end; col += K::kStrip) {
    const int n = length(col, end, K::kStrip);
    double rounder[K::kStrip] = {};
    for (int j = 0; j < n; ++j)
      rounder[j] =
          FixedColumn(static_cast<uint32_t>(absmax[col + j]), projection_exponent).rounder();
    for (int64_t k = 0; k < rank; ++k) {
      std::memset(sums + k * g.cols + col, 0, static_cast<size_t>(n) * sizeof(int64_t));
    }
    for (int64_t first = 0; first < g.rows; first += kFixedExact) {
      const int64_t last = first + length(first, g.rows, kFixedExact);
      std::memset(partial.data(), 0, strip * sizeof(double));
      for (int64_t row = first; row < last; row += K::kDepth) {
        const int rows = length(row, last, K::kDepth);
        for (int i = 0; i < rows; ++i) {
          float x[K::kStrip] = {};
          load(g, row + i, col, n, x);
          kernel.widen(x, &converted[static_cast<size_t>(i * K::kStrip)], K::kStrip);
        }
        for (int64_t e = 0; e < rows * rank; e += kTile) {
          kernel.widen(p + row * rank + e, &factors[static_cast<size_t>(e)],
                       length(e, rows * rank, kTile));
        }
        kernel.fixed(factors.data(), converted.data(), rounder, partial.data(), rows,
                     static_cast<int>(rank));
      }
      for (int64_t k = 0; k < rank; ++k) {
        for (int j = 0; j < n; ++j) {
          const FixedColumn column(static_cast<uint32_t>(absmax[col + j]), projection_exponent);
          sums[k * g.cols + col + j] +=
              column.units(partial[static_cast<size_t>(k * K::kStrip + j)]);
        }
      }
    }
  }
}

void column_values(const int64_t* sums, const int32_t* absmax, int64_t rank, int64_t cols,
                   int projection_exponent, int64_t begin, int64_t end, float* low) {
  for (int64_t k = 0; k < rank; ++k) {
    for (int64_t j = begin; j < end; ++j) {
      const FixedColumn column(static_cast<uint32_t>(absmax[j]), projection_exponent);
      low[k * cols + j] = column.value(sums[k * cols + j]);
    }
  }
}

void row_scales(const float* n, const float* low, int64_t rank, int64_t begin, int64_t end,
                float* s) {
  for (int64_t i = begin; i < end; ++i) {
    double step = 0.0, gradient = 0.0;
    for (int64_t k = 0; k < rank; ++k) {
      const double x = n[i * rank + k], y = low[i * rank + k];
      step += x * x;
      gradient += y * y;
    }
    s[i] = canonical(norm_ratio(step, gradient));
  }
}

void column_scales(const float* n, const float* low, int64_t rank, int64_t cols, int64_t begin,
                   int64_t end, float* s) {
  const K& kernel = lowrank_kernels();
  for (int64_t col = begin; col < end; col += kTile) {
    const int count = length(col, end, kTile);
    double step[kTile] = {}, gradient[kTile] = {};
    for (int64_t k = 0; k < rank; ++k) {
      kernel.squares(n + k * cols + col, count, step);
      kernel.squares(low + k * cols + col, count, gradient);
    }
    for (int j = 0; j < count; ++j) s[col + j] = canonical(norm_ratio(step[j], gradient[j]));
  }
}

void add_squares(const float* x, int64_t begin, int64_t end, int64_t* words) {
  constexpr int kPart = 1 << 22;
  for (int64_t at = begin; at < end; at += kPart) {
    lowrank_kernels().add_squares(x + at, length(at, end, kPart), words);
    exact_carry(words);
  }
}

namespace {

/// Calls f(i, col, n) for the tiles of rows [begin, end), and `carry` before the sums can overflow.
template <class F, class Carry>
void tiles(int64_t cols, int64_t begin, int64_t end, F&& f, Carry&& carry) {
  int64_t since = 0;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t col = 0; col < cols; col += kTile) {
      const int n = length(col, cols, kTile);
      f(i, col, n);
      since += n;
      if (since + kTile > ExactSum::kRoom) {
        carry();
        since = 0;
      }
    }
  }
  carry();
}

}  // namespace

void apollo_norm(const GradRows& g, Scales s, const Scaling& c, int64_t begin, int64_t end,
                 int64_t* words) {
  const K& kernel = lowrank_kernels();
  const auto tile = [&](int64_t i, int64_t col, int n) {
    float x[kTile], u[kTile], room[kTile];
    load(g, i, col, n, x);
    kernel.unlimited(x, spread(s, i, col, n, room), c, u, n);
    kernel.add_squares(u, n, words);
  };
  tiles(g.cols, begin, end, tile, [&] { exact_carry(words); });
}

void apollo_step(const GradRows& g, Scales s, const Scaling& c, const ParamRows& p, int64_t begin,
                 int64_t end) {
  const K& kernel = lowrank_kernels();
  const auto tile = [&](int64_t i, int64_t col, int n) {
    float x[kTile], u[kTile], room[kTile];
    load(g, i, col, n, x);
    kernel.limited(x, spread(s, i, col, n, room), c, u, n);
    step_tile(p, g.cols, i, col, n, c, u);
  };
  tiles(g.cols, begin, end, tile, [] {});
}

void back(const float* x, const float* p, int64_t rank, int64_t cols, bool tall, int64_t begin,
          int64_t end, float* out) {
  const float* const a = tall ? x : p;
  const auto load_row = [&](int64_t i, int64_t k, int n, float* to) {
    std::memcpy(to, a + i * rank + k, static_cast<size_t>(n) * sizeof(float));
  };
  if (tall) {
    product(load_row, p, 1, rank, rank, cols, begin, end, out);
  } else {
    product(load_row, x, cols, 1, rank, cols, begin, end, out);
  }
}

void fira_norm(const GradRows& g, const float* low, const float* p, int64_t rank, bool tall,
               Scales s, const Scaling& c, int64_t begin, int64_t end, float* residual,
               int64_t* words) {
  const K& kernel = lowrank_kernels();
  back(low, p, rank, g.cols, tall, begin, end, residual);
  const auto tile = [&](int64_t i, int64_t col, int n) {
    float x[kTile], room[kTile];
    float* const e = residual + i * g.cols + col;
    load(g, i, col, n, x);
    kernel.residual(x, e, spread(s, i, col, n, room), c, e, n);
    kernel.add_squares(e, n, words);
  };
  tiles(g.cols, begin, end, tile, [&] { exact_carry(words); });
}

void fira_step(const GradRows& g, const float* n, const float* p, int64_t rank, bool tall,
               const Scaling& c, const float* residual, const ParamRows& param, int64_t begin,
               int64_t end) {
  const K& kernel = lowrank_kernels();
  std::vector<float> whole(static_cast<size_t>(K::kRows * g.cols));
  for (int64_t row = begin; row < end; row += K::kRows) {
    const int rows = length(row, end, K::kRows);
    // back() writes at row * cols, so its rows here are those of `whole`.
    if (tall) {
      back(n + row * rank, p, rank, g.cols, true, 0, rows, whole.data());
    } else {
      back(n, p + row * rank, rank, g.cols, false, 0, rows, whole.data());
    }
    const auto tile = [&](int64_t i, int64_t col, int count) {
      float u[kTile];
      kernel.joined(&whole[static_cast<size_t>((i - row) * g.cols + col)],
                    residual + i * g.cols + col, c, u, count);
      step_tile(param, g.cols, i, col, count, c, u);
    };
    tiles(g.cols, row, row + rows, tile, [] {});
  }
}

}  // namespace lowbit::cpu
