// Compares low-rank steps of the CUDA library in the emulator with those of the CPU, byte for byte.
// Include after cuda_emulator.h and cuda/matrices/lowrank.cu.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "check.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/step.h"
#include "cuda_sample.h"

namespace lowbit {
namespace {

/// A matrix, or the rows [begin, end) of one with `whole` rows.
struct MatrixSpec {
  int64_t rows, cols, rank;
  const char* param = "bfloat16_stochastic";
  int grad = 0;  // index into GradFormats
  bool fira = false, by_tensor = false, limits = true, maximize = false, given = false;
  int64_t begin = 0, whole = 0;  // whole: 0 if all rows are local
  bool tall() const { return (whole ? whole : rows) >= cols; }
  std::string name() const {
    return std::to_string(rows) + "x" + std::to_string(cols) + " rank " + std::to_string(rank) +
           (fira        ? " fira "
            : by_tensor ? " tensor "
                        : " channel ") +
           param;
  }
};

struct LowRankOptions {
  float grad_scale = 1.0f, found_inf = 0.0f;
  double rate = 1e-2;
  int odd = 0;  // number of NaN and infinite gradients
  int steps = 2;
  float size = 1.0f;
};

std::mt19937 engine(7);
float normal_value() { return static_cast<float>(std::normal_distribution<double>()(engine)); }

/// The data of a matrix on one side.
struct Side {
  std::vector<char> param, compensation;
  std::vector<float> p, low, n, scales, residual;
  std::vector<uint32_t> absmax;
  std::vector<int64_t> sums, words;
  float norm = 0.0f, step = 0.0f;
  bool operator==(const Side& o) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
    };
    return same(param, o.param) && same(compensation, o.compensation) && same(p, o.p) &&
           same(low, o.low) && same(scales, o.scales) && float_bits(norm) == float_bits(o.norm);
  }
};

struct Matrix {
  MatrixSpec spec;
  Side cpu, gpu;
  std::vector<char> grad;
  std::vector<double> hyper;
  double gamma = 1.01;
  int64_t gap = 2;
  uint64_t seed = 0x123456789abull;
  uint32_t stream = 0;
  int exponent = 0;
};

Matrix make_matrix(const MatrixSpec& spec, uint32_t stream) {
  Matrix m;
  m.spec = spec;
  m.stream = stream;
  const int64_t n = spec.rows * spec.cols, low = spec.rank * (spec.tall() ? spec.rows : spec.cols);
  const ParamInfo info = param_info(find_param(spec.param));
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  Side& s = m.cpu;
  s.param.resize(size(n * info.bytes)), s.compensation.resize(size(n * info.compensation_bytes));
  std::vector<float> x(size(n));
  for (float& v : x) v = normal_value();
  std::vector<uint16_t> random(kTile + 64, 0x8000);
  for (int64_t at = 0; at < n; at += kTile) {
    cpu::kernels().store_param[find_param(spec.param)](
        x.data() + at, s.param.data() + at * info.bytes,
        info.compensation_bytes ? s.compensation.data() + at * info.compensation_bytes : nullptr,
        static_cast<int>(std::min<int64_t>(kTile, n - at)), random.data());
  }
  s.p.resize(size(spec.rank * (spec.tall() ? spec.cols : spec.rows)));
  for (float& v : s.p) v = normal_value() / 8.0f;
  m.exponent = spec.given ? 0 : projection_exponent(projection_key(0, 0, 0, spec.rank));
  s.low.resize(size(low)), s.n.resize(size(low));
  s.scales.resize(size(spec.by_tensor ? 1 : spec.tall() ? spec.rows : spec.cols));
  if (spec.fira) s.residual.resize(size(n));
  if (!spec.tall()) s.absmax.resize(size(spec.cols)), s.sums.resize(size(spec.rank * spec.cols));
  s.words.resize(3 * ExactSum::kWords);
  m.gpu = s;
  m.grad.resize(size(n * grad_bytes(spec.grad)));
  const double root = std::sqrt(1.5);
  m.hyper = {1e-2, 0.9, 0.99, 0.1, stream % 2 ? root : 1.0, stream % 2 ? 1.0 : root, 0.75};
  return m;
}

void fill_grad(Matrix& m, const LowRankOptions& o) {
  const int64_t n = m.spec.rows * m.spec.cols;
  const float size = o.size * (1.0f + static_cast<float>(engine() % 5));
  for (int64_t i = 0; i < n; ++i) {
    float v = normal_value() * size;
    if (engine() % 7 == 0) v = std::ldexp(v, -static_cast<int>(engine() % 40));
    if (m.spec.grad == 0) {
      std::memcpy(m.grad.data() + 4 * i, &v, 4);
    } else {
      const uint16_t half = m.spec.grad == 1 ? static_cast<uint16_t>(float_bits(v) >> 16)
                                             : static_cast<uint16_t>(engine() & 0xbbff);
      std::memcpy(m.grad.data() + 2 * i, &half, 2);
    }
  }
  for (int i = 0; i < o.odd && n > 0 && m.spec.grad == 0; ++i) {
    const uint32_t bits[] = {0x7fc00001u, 0x7f800000u, 0xff800000u, 0x7f7fffffu, 1u};
    std::memcpy(m.grad.data() + 4 * (static_cast<int64_t>(engine()) % n), bits + i % 5, 4);
  }
}

/// The inner step, equal on both sides: N is a function of L.
void inner(std::vector<float>& n, const std::vector<float>& low, float step) {
  for (size_t i = 0; i < n.size(); ++i) n[i] = low[i] / (std::fabs(low[i]) + 0.1f * step);
}

void step_cpu(Matrix& m, const LowRankOptions& o) {
  const MatrixSpec& s = m.spec;
  Side& to = m.cpu;
  if (o.found_inf != 0.0f) return;
  const int64_t t = std::llrint(to.step) + 1;
  const double g_scale = (s.maximize ? -1.0 : 1.0) / static_cast<double>(o.grad_scale);
  const cpu::GradRows g{m.grad.data(), s.grad, s.rows, s.cols, static_cast<float>(g_scale)};
  const bool tall = s.tall();
  const ProjectionKey key =
      projection_key(m.seed, static_cast<uint32_t>((t - 1) / m.gap), m.stream, s.rank);
  if (!s.given)
    cpu::make_projection(key, tall ? 0 : s.begin, tall ? s.cols : s.begin + s.rows, to.p.data());
  if (tall) {
    cpu::project_rows(g, to.p.data(), s.rank, 0, s.rows, to.low.data());
  } else {
    auto* absmax = reinterpret_cast<int32_t*>(to.absmax.data());
    cpu::column_absmax(g, 0, s.cols, absmax);
    cpu::project_columns(g, to.p.data(), s.rank, m.exponent, absmax, 0, s.cols, to.sums.data());
    cpu::column_values(to.sums.data(), absmax, s.rank, s.cols, m.exponent, 0, s.cols,
                       to.low.data());
  }
  to.step += 1.0f;
  inner(to.n, to.low, to.step);
  if (s.by_tensor) {
    int64_t words[2][ExactSum::kWords] = {};
    cpu::add_squares(to.n.data(), 0, static_cast<int64_t>(to.n.size()), words[0]);
    cpu::add_squares(to.low.data(), 0, static_cast<int64_t>(to.low.size()), words[1]);
    to.scales[0] = canonical(norm_ratio(exact_value(words[0]), exact_value(words[1])));
  } else if (tall) {
    cpu::row_scales(to.n.data(), to.low.data(), s.rank, 0, s.rows, to.scales.data());
  } else {
    cpu::column_scales(to.n.data(), to.low.data(), s.rank, s.cols, 0, s.cols, to.scales.data());
  }
  const cpu::Scales scales{to.scales.data(), s.by_tensor ? cpu::Channel::kTensor
                                             : tall      ? cpu::Channel::kRow
                                                         : cpu::Channel::kColumn};
  Scaling c;
  c.front = static_cast<float>(m.hyper[4]), c.after = static_cast<float>(m.hyper[5]);
  c.alpha = static_cast<float>(m.hyper[6]);
  c.eta = static_cast<float>(bias_corrected(o.rate, m.hyper[1], m.hyper[2], t));
  c.decay = static_cast<float>(o.rate * m.hyper[3]);
  int64_t words[ExactSum::kWords] = {};
  if (s.fira) {
    cpu::fira_norm(g, to.low.data(), to.p.data(), s.rank, tall, scales, c, 0, s.rows,
                   to.residual.data(), words);
  } else if (s.limits) {
    cpu::apollo_norm(g, scales, c, 0, s.rows, words);
  }
  if (s.limits) {
    double state = to.norm;
    c.divisor = static_cast<float>(Limiter{m.gamma}.divisor(std::sqrt(exact_value(words)), state));
    to.norm = static_cast<float>(state);
  }
  if (o.rate == 0.0) return;
  const cpu::ParamRows param{to.param.data(),
                             to.compensation.empty() ? nullptr : to.compensation.data(),
                             find_param(s.param),
                             s.begin * s.cols,
                             {static_cast<uint32_t>(m.seed), static_cast<uint32_t>(m.seed >> 32),
                              static_cast<uint32_t>(t), m.stream}};
  if (s.fira) {
    cpu::fira_step(g, to.n.data(), to.p.data(), s.rank, tall, c, to.residual.data(), param, 0,
                   s.rows);
  } else {
    cpu::apollo_step(g, scales, c, param, 0, s.rows);
  }
}

LowRankJob job_of(Matrix& m, const float* lr) {
  const MatrixSpec& s = m.spec;
  Side& to = m.gpu;
  LowRankJob job{};
  job.grad = m.grad.data(), job.param = to.param.data();
  job.compensation = to.compensation.empty() ? nullptr : to.compensation.data();
  job.step = &to.step, job.lr = lr;
  job.p = to.p.data(), job.low = to.low.data(), job.n = to.n.data();
  job.scales = to.scales.data(), job.residual = to.residual.data(), job.norm = &to.norm;
  job.absmax = to.absmax.data(), job.sums = to.sums.data(), job.words = to.words.data();
  job.rows = s.rows, job.cols = s.cols, job.rank = s.rank;
  job.first = s.begin * s.cols, job.p_first = s.tall() ? 0 : s.begin;
  job.gap = m.gap, job.seed = m.seed, job.stream = m.stream;
  job.grad_format = s.grad, job.param_format = find_param(s.param), job.exponent = m.exponent;
  job.tall = s.tall(), job.fira = s.fira, job.draws = !s.given, job.by_tensor = s.by_tensor;
  job.limits = s.limits, job.maximize = s.maximize;
  std::copy(m.hyper.begin(), m.hyper.end(), job.hyper);
  job.gamma = m.gamma;
  return job;
}

const char* step_gpu(std::vector<Matrix>& all, const LowRankOptions& o) {
  std::vector<LowRankJob> jobs, table(all.size());
  const auto lr = static_cast<float>(o.rate);
  for (Matrix& m : all) {
    for (auto* zeroed : {&m.gpu.sums, &m.gpu.words}) std::fill(zeroed->begin(), zeroed->end(), 0);
    std::fill(m.gpu.absmax.begin(), m.gpu.absmax.end(), 0u);
    jobs.push_back(job_of(m, m.stream % 3 == 0 ? &lr : nullptr));
    // The tensor overrides the number.
    jobs.back().hyper[0] = jobs.back().lr != nullptr ? 7.0 : o.rate;
  }
  CudaLowRank call{0,  nullptr,      jobs.data(),   static_cast<int64_t>(jobs.size()),
                   {}, table.data(), &o.grad_scale, &o.found_inf};
  for (int pass = 0; pass < kLowRankPasses; ++pass) {
    call.pass = static_cast<LowRankPass>(pass);
    if (const char* error = lowbit_cuda_lowrank(&call)) return error;
    if (call.pass != LowRankPass::kValues || o.found_inf != 0.0f) continue;
    for (Matrix& m : all) m.gpu.step += 1.0f, inner(m.gpu.n, m.gpu.low, m.gpu.step);
  }
  return nullptr;
}

/// Steps the matrices on both sides. Returns how many differ after any step.
int lowrank_differ(const std::vector<MatrixSpec>& list, LowRankOptions o = {}) {
  const std::vector<MatrixSpec> specs = sample.of_list(list);
  if (specs.empty()) return 0;
  o.steps = sample.steps(o.steps);
  o.rate = static_cast<double>(static_cast<float>(o.rate));  // the kernels read it as float32
  std::vector<Matrix> all;
  for (const MatrixSpec& spec : specs)
    all.push_back(make_matrix(spec, static_cast<uint32_t>(all.size())));
  int wrong = 0;
  for (int step = 0; step < o.steps; ++step) {
    for (Matrix& m : all) {
      fill_grad(m, o);
      step_cpu(m, o);
    }
    if (const char* error = step_gpu(all, o)) {
      std::fprintf(stderr, "%s\n", error);
      return 1;
    }
    for (Matrix& m : all) {
      if (m.cpu == m.gpu) continue;
      if (++wrong <= 5)
        std::fprintf(stderr, "step %d: %s differs\n", step + 1, m.spec.name().c_str());
    }
    if (wrong > 0) break;
  }
  sample.report(specs.size(), wrong, specs[0].name());
  return wrong;
}

}  // namespace
}  // namespace lowbit
