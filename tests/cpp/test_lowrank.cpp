// The low-rank parts: the projection, the products, scaling and the limiter; lowrank/ has exact
// sums, trajectories and the subspace.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "core/registry.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/step.h"
#include "lowrank/lowrank.h"

namespace {

using namespace lowbit;

/// Moments, the Kolmogorov-Smirnov distance from the normal distribution, and single values to
/// 1e-12 (of the error function).
void check_normal() {
  constexpr int kCount = 200000;
  const auto key = projection_key(7, 3, 11, 1);
  std::vector<float> x(kCount);
  projection_entries(key, 0, kCount, x.data());
  double moment[5] = {};
  for (const float v : x) {
    for (int k = 1; k <= 4; ++k) moment[k] += std::pow(static_cast<double>(v), k) / kCount;
  }
  const double deviation = 1.0 / std::sqrt(static_cast<double>(kCount));  // of the mean
  check(std::fabs(moment[1]) < 4 * deviation, "mean");
  check(std::fabs(moment[2] - 1) < 4 * std::sqrt(2.0) * deviation, "variance");
  check(std::fabs(moment[3]) < 4 * std::sqrt(15.0) * deviation, "third moment");
  check(std::fabs(moment[4] - 3) < 4 * std::sqrt(96.0) * deviation, "fourth moment");
  std::sort(x.begin(), x.end());
  double distance = 0.0;
  for (int i = 0; i < kCount; ++i) {
    const double exact =
        0.5 * std::erfc(-static_cast<double>(x[static_cast<size_t>(i)]) / std::sqrt(2.0));
    distance = std::max({distance, std::fabs(exact - i / double{kCount}),
                         std::fabs(exact - (i + 1) / double{kCount})});
  }
  check(distance < 1.95 * deviation, "Kolmogorov-Smirnov, 0.1 per cent");
  double before = -10.0;
  for (int i = 0; i < 100000; ++i) {
    const uint32_t word = static_cast<uint32_t>(i) * 42949u + (i < 1000 ? 0u : draw32() % 42949u);
    const double u = (word + 0.5) * 0x1p-32, z = normal(i < 1000 ? static_cast<uint32_t>(i) : word);
    const double target = i < 1000 ? (i + 0.5) * 0x1p-32 : u;
    check(std::fabs(0.5 * std::erfc(-z / std::sqrt(2.0)) / target - 1) < 1e-12, "normal");
    check(normal(~word) == -normal(word), "normal is odd");
    if (i == 1000) before = -10.0;
    check(z > before && z >= -kNormalBound, "normal is monotone and bounded");
    before = z;
  }
  check(normal(0xffffffffu) < kNormalBound, "normal's largest");
}

/// An entry does not depend on the requested part. Other seeds, refreshes and streams give other
/// entries.
void check_projection(const std::string& isa) {
  for (const int64_t rank : {1, 3, 8, 130}) {
    const auto key = projection_key(0x123456789abcull, 5, 2, rank);
    std::vector<float> whole(static_cast<size_t>(50 * rank)), part(whole.size());
    cpu::make_projection(key, 0, 50, whole.data());
    for (int round = 0; round < 20; ++round) {
      const int64_t begin = draw32() % 50,
                    end = begin + draw32() % static_cast<uint32_t>(51 - begin);
      cpu::make_projection(key, begin, end, part.data());
      check(std::memcmp(part.data(), &whole[0] + begin * rank,
                        static_cast<size_t>((end - begin) * rank) * 4) == 0,
            isa + " part of a projection");
    }
    const double bound = std::ldexp(1.0, projection_exponent(key));
    for (size_t e = 0; e < whole.size(); ++e) {
      check(whole[e] == projection_entry(key, e) && std::fabs(whole[e]) <= bound, isa + " entry");
    }
    for (const auto& other : {projection_key(0x123456789abdull, 5, 2, rank),
                              projection_key(0x123556789abcull, 5, 2, rank),
                              projection_key(0x123456789abcull, 6, 2, rank),
                              projection_key(0x123456789abcull, 5, 3, rank)}) {
      check(projection_entry(other, 0) != whole[0], "another projection");
    }
  }
  check(exponent_above(1.0) == 0 && exponent_above(1.5) == 1 && exponent_above(0.5) == -1 &&
            exponent_above(6.34) == 3,
        "exponent_above");
}

/// A gradient of any registered type, and its values.
struct Gradient {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
  int format;
  int64_t rows, cols;
  float scale;
  cpu::GradRows part(int64_t begin, int64_t end) const {
    const int64_t size = format == 0 ? 4 : 2;
    return {bytes.data() + begin * cols * size, format, end - begin, cols, scale};
  }
  cpu::GradRows all() const { return part(0, rows); }
};

Gradient gradient(int format, int64_t rows, int64_t cols, float scale) {
  Gradient g{{}, normals(rows * cols, 1e-3f), format, rows, cols, scale};
  for (float& v : g.values) {
    v *= std::ldexp(1.0f, static_cast<int>(draw32() % 12) - 6);
    uint8_t stored[4];
    const uint32_t bits = float_bits(v) & 0xffff0000u;
    const uint16_t half = static_cast<uint16_t>((draw32() & 0x83ff) | (draw32() % 16 << 10));
    if (format == 0) std::memcpy(stored, &v, 4);
    if (format == 1)
      stored[0] = static_cast<uint8_t>(bits >> 16), stored[1] = static_cast<uint8_t>(bits >> 24),
      v = bits_float(bits);
    if (format == 2) std::memcpy(stored, &half, 2), v = Float16Grad::load(half);
    g.bytes.insert(g.bytes.end(), stored, stored + (format == 0 ? 4 : 2));
    v = v * scale;
  }
  return g;
}

/// The products against one element after another, split in several ways.
void check_products(const std::string& isa) {
  const int64_t ranks[] = {1, 2, 5, 8, 13, 33};
  for (int round = 0; round < 18; ++round) {
    const int64_t rank = ranks[round % 6], many = 70 + draw32() % 80,
                  few = 20 + draw32() % 50 + (round % 5 == 0 ? 300 : 0);
    const Gradient tall = gradient(round % 3, std::max(many, few), few, round % 2 ? 0.5f : -1.0f),
                   wide = gradient(round % 3, few, std::max(many, few), round % 2 ? 0.5f : -1.0f);
    const auto p = normals(few * rank, 0.3f);
    const auto at = [](const std::vector<float>& x, int64_t i) {
      return static_cast<double>(x[static_cast<size_t>(i)]);
    };

    std::vector<float> low(static_cast<size_t>(tall.rows * rank)), expected(low.size());
    for (int64_t i = 0; i < tall.rows; ++i) {
      for (int64_t k = 0; k < rank; ++k) {
        double sum = 0.0;
        for (int64_t c = 0; c < few; ++c) sum += at(tall.values, i * few + c) * at(p, c * rank + k);
        expected[static_cast<size_t>(i * rank + k)] = static_cast<float>(sum);
      }
    }
    for (int64_t begin = 0; begin < tall.rows;) {
      const int64_t end = std::min<int64_t>(tall.rows, begin + 1 + draw32() % 90);
      cpu::project_rows(tall.all(), p.data(), rank, begin, end, low.data());
      begin = end;
    }
    check(same(low, expected), isa + " project_rows");

    // Rows over up to 3 ranks, columns over threads.
    const int exponent = 2;
    std::vector<int32_t> absmax(static_cast<size_t>(wide.cols));
    std::vector<int64_t> sums(static_cast<size_t>(wide.cols * rank));
    const int64_t cuts[4] = {0, draw32() % few, few - 1, few}, middle = draw32() % wide.cols;
    int64_t order[4] = {cuts[0], std::min(cuts[1], cuts[2]), cuts[2], cuts[3]};
    for (int r = 0; r < 3; ++r) {
      auto part_absmax = absmax;
      cpu::column_absmax(wide.part(order[r], order[r + 1]), 0, middle, part_absmax.data());
      cpu::column_absmax(wide.part(order[r], order[r + 1]), middle, wide.cols, part_absmax.data());
      for (size_t j = 0; j < absmax.size(); ++j) absmax[j] = std::max(absmax[j], part_absmax[j]);
    }
    for (int r = 0; r < 3; ++r) {
      std::vector<int64_t> part(sums.size());
      cpu::project_columns(wide.part(order[r], order[r + 1]), &p[0] + order[r] * rank, rank,
                           exponent, absmax.data(), 0, middle, part.data());
      cpu::project_columns(wide.part(order[r], order[r + 1]), &p[0] + order[r] * rank, rank,
                           exponent, absmax.data(), middle, wide.cols, part.data());
      for (size_t j = 0; j < sums.size(); ++j) sums[j] += part[j];
    }
    low.assign(sums.size(), 0.0f);
    cpu::column_values(sums.data(), absmax.data(), rank, wide.cols, exponent, 0, wide.cols,
                       low.data());
    bool good = true, close = true;
    for (int64_t j = 0; j < wide.cols; ++j) {
      uint32_t largest = 0;
      for (int64_t i = 0; i < few; ++i)
        largest =
            std::max(largest, magnitude_bits(wide.values[static_cast<size_t>(i * wide.cols + j)]));
      good = good && largest == static_cast<uint32_t>(absmax[static_cast<size_t>(j)]);
      const FixedColumn column(largest, exponent);
      for (int64_t k = 0; k < rank; ++k) {
        int64_t units = 0;
        double sum = 0.0;
        for (int64_t i = 0; i < few; ++i) {
          const float a = p[static_cast<size_t>(i * rank + k)],
                      b = wide.values[static_cast<size_t>(i * wide.cols + j)];
          units += std::llrint(std::ldexp(static_cast<double>(a) * b, -column.exponent));
          sum += static_cast<double>(a) * b;
        }
        good = good && sums[static_cast<size_t>(k * wide.cols + j)] == units;
        close = close &&
                std::fabs(low[static_cast<size_t>(k * wide.cols + j)] - sum) <=
                    1e-7 * std::fabs(sum) + few * std::ldexp(bits_float(largest), exponent - 39);
      }
    }
    check(good, isa + " project_columns");
    check(close, isa + " project_columns is the product");

    // back() for both orientations.
    for (const bool is_tall : {true, false}) {
      const int64_t rows = is_tall ? 75 : few, cols = is_tall ? few : 75;
      const auto x = normals(75 * rank, 1.0f);
      std::vector<float> out(static_cast<size_t>(rows * cols)), wanted(out.size());
      cpu::back(x.data(), p.data(), rank, cols, is_tall, 0, rows / 2, out.data());
      cpu::back(x.data(), p.data(), rank, cols, is_tall, rows / 2, rows, out.data());
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          double sum = 0.0;
          for (int64_t k = 0; k < rank; ++k)
            sum += is_tall ? at(x, i * rank + k) * at(p, j * rank + k)
                           : at(p, i * rank + k) * at(x, k * cols + j);
          wanted[static_cast<size_t>(i * cols + j)] = static_cast<float>(sum);
        }
      }
      check(same(out, wanted), isa + " back");
    }
  }
}

/// Columns of zeros, subnormals, the largest floats, infinities and NaN.
void check_special_columns(const std::string& isa) {
  const int64_t rows = 5000, cols = 6, rank = 2;  // more rows than one exact sum in double allows
  std::vector<float> g(static_cast<size_t>(rows * cols)), p(static_cast<size_t>(rows * rank), 1.0f),
      low(cols * rank);
  for (int64_t i = 0; i < rows; ++i) {
    float* row = &g[static_cast<size_t>(i * cols)];
    row[0] = 0.0f, row[1] = 0x1p-149f, row[2] = 0x1p100f, row[3] = i == 17 ? INFINITY : 1.0f;
    row[4] = i == 4999 ? -NAN : 1.0f, row[5] = i % 2 ? 3.0f : -3.0f;
  }
  const cpu::GradRows all{g.data(), 0, rows, cols, 1.0f};
  std::vector<int32_t> absmax(cols);
  std::vector<int64_t> sums(cols * rank);
  cpu::column_absmax(all, 0, cols, absmax.data());
  cpu::project_columns(all, p.data(), rank, 0, absmax.data(), 0, cols, sums.data());
  cpu::column_values(sums.data(), absmax.data(), rank, cols, 0, 0, cols, low.data());
  for (int64_t k = 0; k < rank; ++k) {
    const float* x = &low[static_cast<size_t>(k * cols)];
    check(x[0] == 0.0f && x[1] == 5000 * 0x1p-149f && x[2] == 5000 * 0x1p100f && x[5] == 0.0f,
          isa + " special columns");
    check(float_bits(x[3]) == kCanonicalNan && float_bits(x[4]) == kCanonicalNan,
          isa + " columns that are not finite");
  }
}

template <class P>
void reference_step(const Gradient& g, const std::vector<float>& s, cpu::Channel channel,
                    const Scaling& c, const RandomKey& key, int64_t first,
                    std::vector<uint8_t>& stored) {
  auto* const p = reinterpret_cast<typename P::Storage*>(stored.data());
  for (int64_t e = 0; e < g.rows * g.cols; ++e) {
    const int64_t at = channel == cpu::Channel::kRow      ? e / g.cols
                       : channel == cpu::Channel::kColumn ? e % g.cols
                                                          : 0;
    const float x = g.values[static_cast<size_t>(e)],
                u = x * s[static_cast<size_t>(at)] * c.front / c.divisor * c.after;
    typename P::Compensation compensation{};
    const float q = P::load(p[e], compensation) - c.eta * u;
    const uint64_t index = static_cast<uint64_t>(first + e);
    const uint32_t random16 = random8(key, index >> 3).bits16(static_cast<int>(index & 7));
    p[e] = P::store(q - c.decay * q, random16, compensation);
  }
}

/// Every parameter format and kind of scale, in parts, on a rank that begins anywhere, and the
/// norm.
void check_steps(const std::string& isa) {
  for (int round = 0; round < 18; ++round) {
    const int64_t rows = 11, cols = 250 + draw32() % 300, first = round % 3 ? draw32() : 0;
    const Gradient g = gradient(round % 3, rows, cols, 0.5f);
    const auto s = normals(rows + cols, 1.0f);
    const auto channel = static_cast<cpu::Channel>(round / 3 % 3);
    const int format = round / 2 % 3;
    const Scaling c{1.5f, 1.1f, 0.7f, 1.0f, 0.3f, 0.01f};
    const RandomKey key{draw32(), draw32(), draw32(), draw32()};
    std::vector<uint8_t> stored(static_cast<size_t>(rows * cols * (format == 0 ? 4 : 2)));
    const auto start = normals(rows * cols, 1.0f);
    for (size_t e = 0; e < start.size(); ++e) {
      const uint16_t half = static_cast<uint16_t>(float_bits(start[e]) >> 16);
      format == 0 ? std::memcpy(&stored[4 * e], &start[e], 4)
                  : std::memcpy(&stored[2 * e], &half, 2);
    }
    auto wanted = stored;
    if (format == 0) reference_step<Float32Param>(g, s, channel, c, key, first, wanted);
    if (format == 1) reference_step<BFloat16Nearest>(g, s, channel, c, key, first, wanted);
    if (format == 2) reference_step<BFloat16Stochastic>(g, s, channel, c, key, first, wanted);
    const int64_t cut = draw32() % rows, row_bytes = static_cast<int64_t>(stored.size()) / rows;
    const cpu::ParamRows upper{stored.data(), nullptr, format, first, key},
        lower{stored.data() + cut * row_bytes, nullptr, format, first + cut * cols, key};
    cpu::apollo_step(g.all(), {s.data(), channel}, c, upper, 0, cut);
    const float* const rest = channel == cpu::Channel::kRow ? s.data() + cut : s.data();
    cpu::apollo_step(g.part(cut, rows), {rest, channel}, c, lower, 0, rows - cut);
    check(stored == wanted, isa + " apollo_step");

    Words sum, parts;
    for (int64_t e = 0; e < rows * cols; ++e) {
      const int64_t at = channel == cpu::Channel::kRow      ? e / cols
                         : channel == cpu::Channel::kColumn ? e % cols
                                                            : 0;
      const float u = g.values[static_cast<size_t>(e)] * s[static_cast<size_t>(at)] * c.front;
      exact_add(u * u, sum.word);
    }
    cpu::apollo_norm(g.all(), {s.data(), channel}, c, 0, cut, parts.word);
    cpu::apollo_norm(g.all(), {s.data(), channel}, c, cut, rows, parts.word);
    sum.carry(), parts.carry();
    check(sum == parts, isa + " apollo_norm");
  }
}

void check_limiter() {
  const Limiter limiter;
  double previous = 0.0;
  check(limiter.divisor(2.0, previous) == 1.0 && previous == 2.0, "limiter begins");
  check(limiter.divisor(2.01, previous) == 1.0 && previous == 2.01, "limiter lets pass");
  const double divisor = limiter.divisor(4.02, previous);
  check(std::fabs(divisor - 4.02 / (2.01 + 1e-8) / 1.01) < 1e-15 && previous == 4.02 / divisor,
        "limiter holds");
  const double kept = previous;
  check(limiter.divisor(NAN, previous) == 1.0 && limiter.divisor(INFINITY, previous) == 1.0 &&
            previous == kept,
        "limiter and no number");
  previous = 1e-7;
  check(limiter.divisor(5.0, previous) == 1.0 && previous == 5.0, "limiter begins again");
}

}  // namespace

int main() {
  check_exact_sums();
  check_normal();
  check_limiter();
  std::vector<std::vector<float>> first, subspaces;
  const std::string names = cpu::usable_isas();
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(' ', at), names.size());
    const std::string name = names.substr(at, end - at);
    check(cpu::set_isa(name.c_str()) && name.starts_with(cpu::lowrank_kernels().isa),
          "the kernels of " + name);
    check_sums(name);
    check_projection(name);
    check_products(name);
    check_special_columns(name);
    check_steps(name);
    check_trajectories(name, first);
    check_subspace(name, subspaces);
    at = end + 1;
  }
  return finish();
}
