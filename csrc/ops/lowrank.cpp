// Reception of low-rank steps: the passes of cpu/matrices/lowrank.h over the local shard of one
// parameter, each checked and cut among threads. lowbit/step/lowrank.py drives them and reduces
// over ranks between.
#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "core/exact_sum.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/matrices/subspace.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kProductRows = 64;      // a thread starts for no fewer rows of a product
constexpr int64_t kElementGrain = 16384;  // of a pass over elements

int64_t row_grain(int64_t cols) { return kElementGrain / (cols + 1) + 1; }

/// Threads add to words of their own; integers, so their order does not matter.
template <class Fn>
void add_words(int64_t count, int64_t grain, int64_t* words, const Fn& fn) {
  std::mutex mutex;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    int64_t own[ExactSum::kWords] = {};
    fn(begin, end, own);
    const std::lock_guard lock(mutex);
    exact_merge(own, words);
  });
}

cpu::GradRows grad_rows(const char* op, const Tensor& grad, double scale) {
  const int format = grad_format(grad);
  STD_TORCH_CHECK(format >= 0 && grad.dim() == 2 && grad.is_contiguous(), op,
                  ": the gradient must be a contiguous matrix of float32, bfloat16 or float16");
  return {grad.const_data_ptr(), format, grad.size(0), grad.size(1), static_cast<float>(scale)};
}

/// A contiguous matrix of the type; -1: any length.
void check(const char* op, const char* what, const Tensor& t, ScalarType dtype, int64_t rows,
           int64_t cols) {
  STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == dtype && t.is_contiguous() && t.is_cpu() &&
                      (rows < 0 || t.size(0) == rows) && (cols < 0 || t.size(1) == cols),
                  op, ": ", what, " must be a contiguous CPU matrix [", rows, ", ", cols,
                  "] of its dtype");
}
const float* floats(const char* op, const char* what, const Tensor& t, int64_t rows, int64_t cols) {
  check(op, what, t, ScalarType::Float, rows, cols);
  return static_cast<const float*>(t.const_data_ptr());
}
template <class T>
T* vector_of(const char* op, const char* what, const Tensor& t, ScalarType dtype, int64_t length) {
  STD_TORCH_CHECK(t.scalar_type() == dtype && t.is_contiguous() && t.is_cpu() &&
                      (length < 0 || t.numel() == length),
                  op, ": ", what, " must have ", length, " contiguous numbers of its dtype");
  return static_cast<T*>(t.mutable_data_ptr());
}

Tensor made(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, dtype);
}
Tensor no_words(const Tensor& like, int64_t count) {
  Tensor words = made(like, {count, ExactSum::kWords}, ScalarType::Long);
  std::fill_n(static_cast<int64_t*>(words.mutable_data_ptr()), count * ExactSum::kWords, 0);
  return words;
}
int64_t* words_of(const Tensor& words, int64_t i) {
  return static_cast<int64_t*>(words.mutable_data_ptr()) + i * ExactSum::kWords;
}

/// hyper: lr, beta1, beta2, weight_decay, front, after, alpha.
Scaling scaling_of(const char* op, const std::vector<double>& hyper, double divisor, int64_t step) {
  STD_TORCH_CHECK(hyper.size() == 7 && step >= 1, op, ": takes 7 numbers, not ", hyper.size());
  Scaling c;
  c.front = static_cast<float>(hyper[4]);
  c.after = static_cast<float>(hyper[5]);
  c.alpha = static_cast<float>(hyper[6]);
  c.divisor = static_cast<float>(divisor);
  c.eta = static_cast<float>(bias_corrected(hyper[0], hyper[1], hyper[2], step));
  c.decay = static_cast<float>(hyper[0] * hyper[3]);
  return c;
}

/// One scale for each row or each column, or one for all, which then has no dimension.
cpu::Scales scales_of(const char* op, const Tensor& scales, const cpu::GradRows& g, bool by_row) {
  const bool tensor = scales.dim() == 0;
  vector_of<float>(op, "scales", scales, ScalarType::Float, tensor ? 1 : by_row ? g.rows : g.cols);
  return {static_cast<const float*>(scales.const_data_ptr()), tensor   ? cpu::Channel::kTensor
                                                              : by_row ? cpu::Channel::kRow
                                                                       : cpu::Channel::kColumn};
}

struct StoredParam {
  cpu::ParamRows rows;
  StoredParam(const char* op, const Tensor& param, const MaybeTensor& compensation, int64_t number,
              const cpu::GradRows& g, int64_t first, int64_t seed, int64_t stream, int64_t step) {
    const int format = checked_param(op, number);
    const ParamInfo info = param_info(format);
    check(op, "the parameter", param, scalar_type(info.dtype), g.rows, g.cols);
    const bool compensated = info.compensation_dtype[0] != 0;
    STD_TORCH_CHECK(compensated == compensation.has_value(), op, ": '", info.name, "' keeps ",
                    compensated ? "something" : "nothing", " to compensate the parameter");
    if (compensated) {
      vector_of<void>(op, "the compensation", *compensation, scalar_type(info.compensation_dtype),
                      g.rows * g.cols * compensation_width(info));
    }
    rows = {param.mutable_data_ptr(), compensated ? compensation->mutable_data_ptr() : nullptr,
            format, first,
            random_key(static_cast<uint64_t>(seed), static_cast<uint32_t>(step),
                       static_cast<uint32_t>(stream))};
  }
};

void projection(Tensor out, int64_t seed, int64_t stream, int64_t refresh, int64_t begin) {
  check("lowbit::projection", "the projection", out, ScalarType::Float, -1, -1);
  const int64_t rank = out.size(1);
  const ProjectionKey key =
      projection_key(static_cast<uint64_t>(seed), static_cast<uint32_t>(refresh),
                     static_cast<uint32_t>(stream), rank);
  auto* p = static_cast<float*>(out.mutable_data_ptr());
  parallel_for(out.size(0), 4096 / (rank + 1) + 1, [&](int64_t from, int64_t to) {
    cpu::make_projection(key, begin + from, begin + to, p + from * rank);
  });
}

bool singular_vectors(Tensor grad, double g_scale, Tensor out) {
  const char* op = "lowbit::singular_vectors";
  const cpu::GradRows g = grad_rows(op, grad, g_scale);
  const bool tall = g.rows >= g.cols;
  const int64_t n = tall ? g.cols : g.rows, blocks = ceil_div(n, kProductRows);
  check(op, "the projection", out, ScalarType::Float, n, -1);
  STD_TORCH_CHECK(out.size(1) <= n, op, ": a matrix of ", g.rows, " by ", g.cols, " has ", n,
                  " singular vectors, not ", out.size(1));
  std::vector<double> a(static_cast<size_t>(n * n));
  const auto block = [&](int64_t i) {
    cpu::gram(g, tall, i * kProductRows, std::min(n, (i + 1) * kProductRows), a.data());
  };
  // Rows end at the diagonal: a short block goes with a long one.
  parallel_for((blocks + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      block(i);
      if (blocks - 1 - i != i) block(blocks - 1 - i);
    }
  });
  const auto parallel = [](int64_t count, const cpu::Body& body) { parallel_for(count, 16, body); };
  return cpu::leading_vectors(a.data(), n, out.size(1), static_cast<float*>(out.mutable_data_ptr()),
                              parallel);
}

Tensor project_rows(Tensor grad, double g_scale, Tensor p) {
  const char* op = "lowbit::project_rows";
  const cpu::GradRows g = grad_rows(op, grad, g_scale);
  const float* from = floats(op, "the projection", p, g.cols, -1);
  const int64_t rank = p.size(1);
  Tensor low = made(grad, {g.rows, rank}, ScalarType::Float);
  auto* out = static_cast<float*>(low.mutable_data_ptr());
  parallel_for(g.rows, kProductRows, [&](int64_t begin, int64_t end) {
    cpu::project_rows(g, from, rank, begin, end, out);
  });
  return low;
}

Tensor column_absmax(Tensor grad, double g_scale) {
  const cpu::GradRows g = grad_rows("lowbit::column_absmax", grad, g_scale);
  Tensor absmax = made(grad, {g.cols}, ScalarType::Int);
  auto* out = static_cast<int32_t*>(absmax.mutable_data_ptr());
  parallel_for(g.cols, row_grain(g.rows) + 255,
               [&](int64_t begin, int64_t end) { cpu::column_absmax(g, begin, end, out); });
  return absmax;
}

Tensor project_columns(Tensor grad, double g_scale, Tensor p, Tensor absmax, int64_t exponent) {
  const char* op = "lowbit::project_columns";
  const cpu::GradRows g = grad_rows(op, grad, g_scale);
  const float* from = floats(op, "the projection", p, g.rows, -1);
  const auto* bits = vector_of<int32_t>(op, "absmax", absmax, ScalarType::Int, g.cols);
  const int64_t rank = p.size(1), strips = ceil_div(g.cols, kProductRows);
  Tensor sums = made(grad, {rank, g.cols}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(sums.mutable_data_ptr());
  parallel_for(strips, 1, [&](int64_t begin, int64_t end) {
    cpu::project_columns(g, from, rank, static_cast<int>(exponent), bits, begin * kProductRows,
                         std::min(g.cols, end * kProductRows), out);
  });
  return sums;
}

Tensor column_values(Tensor sums, Tensor absmax, int64_t exponent) {
  const char* op = "lowbit::column_values";
  check(op, "sums", sums, ScalarType::Long, -1, -1);
  const int64_t rank = sums.size(0), cols = sums.size(1);
  const auto* bits = vector_of<int32_t>(op, "absmax", absmax, ScalarType::Int, cols);
  const auto* from = static_cast<const int64_t*>(sums.const_data_ptr());
  Tensor low = made(sums, {rank, cols}, ScalarType::Float);
  auto* out = static_cast<float*>(low.mutable_data_ptr());
  parallel_for(cols, row_grain(rank) + 63, [&](int64_t begin, int64_t end) {
    cpu::column_values(from, bits, rank, cols, static_cast<int>(exponent), begin, end, out);
  });
  return low;
}

Tensor channel_scales(Tensor n, Tensor low, bool tall) {
  const char* op = "lowbit::channel_scales";
  const float* from = floats(op, "N", n, -1, -1);
  const int64_t rows = n.size(0), cols = n.size(1);
  const float* other = floats(op, "L", low, rows, cols);
  Tensor scales = made(n, {tall ? rows : cols}, ScalarType::Float);
  auto* out = static_cast<float*>(scales.mutable_data_ptr());
  parallel_for(tall ? rows : cols, row_grain(tall ? cols : rows) + 63,
               [&](int64_t begin, int64_t end) {
                 if (tall) {
                   cpu::row_scales(from, other, cols, begin, end, out);
                 } else {
                   cpu::column_scales(from, other, rows, cols, begin, end, out);
                 }
               });
  return scales;
}

/// Exact sums of the squares of N and of L.
Tensor squares(Tensor n, Tensor low) {
  const char* op = "lowbit::squares";
  const float* const from[] = {floats(op, "N", n, -1, -1),
                               floats(op, "L", low, n.size(0), n.size(1))};
  Tensor words = no_words(n, 2);
  for (const int k : {0, 1}) {
    add_words(n.numel(), kElementGrain, words_of(words, k),
              [&](int64_t begin, int64_t end, int64_t* own) {
                cpu::add_squares(from[k], begin, end, own);
              });
  }
  return words;
}

Tensor tensor_scale(Tensor words) {
  check("lowbit::tensor_scale", "words", words, ScalarType::Long, 2, ExactSum::kWords);
  const float ratio = norm_ratio(exact_value(words_of(words, 0)), exact_value(words_of(words, 1)));
  Tensor scale = made(words, {}, ScalarType::Float);
  *static_cast<float*>(scale.mutable_data_ptr()) =
      ratio == ratio ? ratio : bits_float(kCanonicalNan);
  return scale;
}

Tensor apollo_norm(Tensor grad, double g_scale, Tensor scales, bool tall,
                   std::vector<double> hyper) {
  const char* op = "lowbit::apollo_norm";
  const cpu::GradRows g = grad_rows(op, grad, g_scale);
  const cpu::Scales s = scales_of(op, scales, g, tall);
  const Scaling c = scaling_of(op, hyper, 1.0, 1);
  Tensor words = no_words(grad, 1);
  add_words(g.rows, row_grain(g.cols), words_of(words, 0),
            [&](int64_t begin, int64_t end, int64_t* own) {
              cpu::apollo_norm(g, s, c, begin, end, own);
            });
  return words;
}

std::tuple<Tensor, Tensor> fira_norm(Tensor grad, double g_scale, Tensor low, Tensor p,
                                     Tensor scales, bool tall, std::vector<double> hyper) {
  const char* op = "lowbit::fira_norm";
  const cpu::GradRows g = grad_rows(op, grad, g_scale);
  const cpu::Scales s = scales_of(op, scales, g, tall);
  const float* from = floats(op, "the projection", p, tall ? g.cols : g.rows, -1);
  const int64_t rank = p.size(1);
  const float* inner = floats(op, "L", low, tall ? g.rows : rank, tall ? rank : g.cols);
  const Scaling c = scaling_of(op, hyper, 1.0, 1);
  Tensor residual = made(grad, {g.rows, g.cols}, ScalarType::Float), words = no_words(grad, 1);
  auto* out = static_cast<float*>(residual.mutable_data_ptr());
  add_words(g.rows, kProductRows, words_of(words, 0),
            [&](int64_t begin, int64_t end, int64_t* own) {
              cpu::fira_norm(g, inner, from, rank, tall, s, c, begin, end, out, own);
            });
  return {residual, words};
}

/// The root of an exact sum of squares.
double exact_norm(Tensor words) {
  check("lowbit::exact_norm", "words", words, ScalarType::Long, 1, ExactSum::kWords);
  return std::sqrt(exact_value(words_of(words, 0)));
}

/// What the limiter divides by; `previous` moves to the norm that is left.
double limit(Tensor words, Tensor previous, double gamma) {
  const char* op = "lowbit::limit";
  check(op, "words", words, ScalarType::Long, 1, ExactSum::kWords);
  float* const norm = vector_of<float>(op, "the norm", previous, ScalarType::Float, 1);
  double state = *norm;
  const double divisor = Limiter{gamma}.divisor(std::sqrt(exact_value(words_of(words, 0))), state);
  *norm = static_cast<float>(state);
  return divisor;
}

void apollo_step(Tensor grad, double g_scale, Tensor scales, bool tall, std::vector<double> hyper,
                 double divisor, Tensor param, MaybeTensor compensation, int64_t format,
                 int64_t first, int64_t seed, int64_t stream, int64_t step) {
  const char* op = "lowbit::apollo_step";
  const cpu::GradRows g = grad_rows(op, grad, g_scale);
  const cpu::Scales s = scales_of(op, scales, g, tall);
  const Scaling c = scaling_of(op, hyper, divisor, step);
  const StoredParam stored(op, param, compensation, format, g, first, seed, stream, step);
  parallel_for(g.rows, row_grain(g.cols), [&](int64_t begin, int64_t end) {
    cpu::apollo_step(g, s, c, stored.rows, begin, end);
  });
}

void fira_step(Tensor grad, Tensor n, Tensor p, Tensor residual, bool tall,
               std::vector<double> hyper, double divisor, Tensor param, MaybeTensor compensation,
               int64_t format, int64_t first, int64_t seed, int64_t stream, int64_t step) {
  const char* op = "lowbit::fira_step";
  const cpu::GradRows g = grad_rows(op, grad, 1.0);
  const float* from = floats(op, "the projection", p, tall ? g.cols : g.rows, -1);
  const int64_t rank = p.size(1);
  const float* inner = floats(op, "N", n, tall ? g.rows : rank, tall ? rank : g.cols);
  const float* rest = floats(op, "the residual", residual, g.rows, g.cols);
  const Scaling c = scaling_of(op, hyper, divisor, step);
  const StoredParam stored(op, param, compensation, format, g, first, seed, stream, step);
  parallel_for(g.rows, kProductRows, [&](int64_t begin, int64_t end) {
    cpu::fira_step(g, inner, from, rank, tall, c, rest, stored.rows, begin, end);
  });
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("projection(Tensor(a!) out, int seed, int stream, int refresh, int begin) -> ()");
  m.def("singular_vectors(Tensor grad, float g_scale, Tensor(a!) out) -> bool");
  m.def("project_rows(Tensor grad, float g_scale, Tensor p) -> Tensor");
  m.def("column_absmax(Tensor grad, float g_scale) -> Tensor");
  m.def(
      "project_columns(Tensor grad, float g_scale, Tensor p, Tensor absmax, int exponent) -> "
      "Tensor");
  m.def("column_values(Tensor sums, Tensor absmax, int exponent) -> Tensor");
  m.def("channel_scales(Tensor n, Tensor low, bool tall) -> Tensor");
  m.def("squares(Tensor n, Tensor low) -> Tensor");
  m.def("tensor_scale(Tensor words) -> Tensor");
  m.def(
      "apollo_norm(Tensor grad, float g_scale, Tensor scales, bool tall, float[] hyper) -> Tensor");
  m.def(
      "fira_norm(Tensor grad, float g_scale, Tensor low, Tensor p, Tensor scales, bool tall, "
      "float[] hyper) -> (Tensor residual, Tensor words)");
  m.def("exact_norm(Tensor words) -> float");
  m.def("limit(Tensor words, Tensor(a!) previous, float gamma) -> float");
  m.def(
      "apollo_step(Tensor grad, float g_scale, Tensor scales, bool tall, float[] hyper, float "
      "divisor, Tensor(a!) param, Tensor(b!)? compensation, int format, int first, int seed, "
      "int stream, int step) -> ()");
  m.def(
      "fira_step(Tensor grad, Tensor n, Tensor p, Tensor residual, bool tall, float[] hyper, float "
      "divisor, Tensor(a!) param, Tensor(b!)? compensation, int format, int first, int seed, "
      "int stream, int step) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("projection", LOWBIT_OPERATOR(projection));
  m.impl("singular_vectors", LOWBIT_OPERATOR(singular_vectors));
  m.impl("project_rows", LOWBIT_OPERATOR(project_rows));
  m.impl("column_absmax", LOWBIT_OPERATOR(column_absmax));
  m.impl("project_columns", LOWBIT_OPERATOR(project_columns));
  m.impl("column_values", LOWBIT_OPERATOR(column_values));
  m.impl("channel_scales", LOWBIT_OPERATOR(channel_scales));
  m.impl("squares", LOWBIT_OPERATOR(squares));
  m.impl("tensor_scale", LOWBIT_OPERATOR(tensor_scale));
  m.impl("apollo_norm", LOWBIT_OPERATOR(apollo_norm));
  m.impl("fira_norm", LOWBIT_OPERATOR(fira_norm));
  m.impl("exact_norm", LOWBIT_OPERATOR(exact_norm));
  m.impl("limit", LOWBIT_OPERATOR(limit));
  m.impl("apollo_step", LOWBIT_OPERATOR(apollo_step));
  m.impl("fira_step", LOWBIT_OPERATOR(fira_step));
}
