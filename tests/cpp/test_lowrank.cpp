// The low-rank parts: exact sums, the projection, the products, scaling, the limiter and the
// subspace.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/exact_sum.h"
#include "core/registry.h"
#include "core/update/apollo.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/matrices/subspace.h"
#include "cpu/step.h"

namespace {

using namespace lowbit;

std::mt19937 random_engine(20240229);
uint32_t draw32() { return static_cast<uint32_t>(random_engine()); }

struct Words {
  int64_t word[ExactSum::kWords] = {};
  void carry() { exact_carry(word); }
  double value() const { return exact_value(word); }
  bool operator==(const Words& other) const {
    return std::memcmp(word, other.word, sizeof word) == 0;
  }
};

/// Sums whose terms are multiples of 2^-40 below 2^40, against 128-bit integers.
void check_values() {
  for (int round = 0; round < 2000; ++round) {
    Words w;
    __int128 sum = 0;
    const int n = 1 + static_cast<int>(draw32() % 300);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
      v = std::ldexp(static_cast<float>(draw32() & 0xffffff), static_cast<int>(draw32() % 56) - 40);
      if (draw32() & 1) v = -v;
      if (round % 3 == 0) v = std::fabs(v);
      sum += static_cast<__int128>(std::ldexp(static_cast<double>(v), 40));
    }
    if (round % 5 == 0) {  // nearly everything cancels
      for (int i = 1; i < n; ++i) {
        exact_add(-x[static_cast<size_t>(i)], w.word);
        sum -=
            static_cast<__int128>(std::ldexp(static_cast<double>(x[static_cast<size_t>(i)]), 40));
      }
    }
    for (const float v : x) exact_add(v, w.word);
    check(w.value() == std::ldexp(static_cast<double>(sum), -40), "exact_value");
    Words carried = w;
    carried.carry();
    check(carried.value() == w.value(), "exact_value of canonical words");
    int64_t digit[ExactSum::kBins];
    check(carried.value() == exact_value(carried.word, digit), "exact_value, the short way");
  }
  for (int round = 0; round < 20000; ++round) {  // every place of the highest word, ties among them
    Words w;
    const uint32_t high = draw32() % ExactSum::kBins;
    for (uint32_t i = 0; i <= high; ++i)
      w.word[i] = draw32() % 3 ? 0 : draw32() % 4 ? draw32() & 0xffff : 0x8000;
    w.word[high] = (draw32() & 0xffff) >> draw32() % 16;
    int64_t digit[ExactSum::kBins];
    check(w.value() == exact_value(w.word, digit), "exact_value of canonical words, the short way");
  }
  Words w;
  for (int i = 0; i < 1000; ++i) exact_add(3.4028234663852886e38f, w.word);
  check(w.value() == 1000.0 * 3.4028234663852886e38, "the largest floats");
  exact_add(0x1p-149f, w.word);
  for (int i = 0; i < 1000; ++i) exact_add(-3.4028234663852886e38f, w.word);
  check(w.value() == 0x1p-149, "the smallest float is not lost");
  exact_add(-0x1p-149f, w.word);
  check(w.value() == 0.0, "zero");
  exact_add(-0x1p-149f, w.word);
  check(w.value() == -0x1p-149, "below zero");
  for (const int64_t rows : {int64_t{1}, ExactSum::kRoom / 3, 2 * ExactSum::kRoom}) {
    constexpr int kColumns = 50;
    int64_t columns[kColumns * ExactSum::kWords] = {};
    Words all, merged;
    for (int i = 0; i < 40 * kColumns; ++i) {
      const float x =
          std::ldexp(static_cast<float>(draw32()), static_cast<int>(draw32() % 60) - 60);
      exact_add(i % 3 ? x : -x, columns + i % kColumns * ExactSum::kWords);
      exact_add(i % 3 ? x : -x, all.word);
    }
    all.carry();
    exact_merge_columns(columns, kColumns, rows, merged.word);
    check(all == merged, "columns merged");
  }
  exact_add(INFINITY, w.word);
  exact_add(NAN, w.word);
  check(std::isnan(w.value()) && w.word[ExactSum::kNonFinite] == 2, "not finite");
}

/// Arbitrary bits, in any order, in parts that are carried and merged.
void check_orders() {
  for (int round = 0; round < 300; ++round) {
    const int n = 1 + static_cast<int>(draw32() % 1500), spread = round % 4;
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
      const uint32_t bits = draw32();
      v = bits_float(spread == 0   ? bits
                     : spread == 1 ? bits % 0x7f800000u
                     : spread == 2 ? bits % 0x01800000u | (bits & 0x80000000u)
                                   : 0x30000000u + bits % 0x10000000u);
    }
    Words one, many;
    for (const float v : x) exact_add(v, one.word);
    one.carry();
    for (int at = 0; at < n;) {
      const int part = std::min(n - at, 1 + static_cast<int>(draw32() % 600));
      Words w;
      exact_add(&x[static_cast<size_t>(at)], part, w.word);
      w.carry();
      exact_merge(w.word, many.word);
      at += part;
    }
    many.carry();
    check(one == many, "parts of a sum");
  }
}

/// The sums of the kernels in use have the same words as the sum of one term after another.
void check_sums(const std::string& isa) {
  for (int round = 0; round < 200; ++round) {
    const int n = 1 + static_cast<int>(draw32() % 3000);
    std::vector<float> x(static_cast<size_t>(n));
    const uint32_t range = 0x3f800000u >> (round % 6);
    for (float& v : x) v = bits_float(draw32() % range | (draw32() & 0x80000000u));
    if (round % 10 == 0) x[draw32() % x.size()] = INFINITY;
    Words a, b, c, d;
    for (const float v : x) exact_add(v, a.word), exact_add(v * v, c.word);
    cpu::kernels().add(x.data(), n, b.word);
    cpu::add_squares(x.data(), 0, n, d.word);
    a.carry(), b.carry(), c.carry();
    check(a == b && c == d, isa + " exact sum");
  }
}

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

std::vector<float> normals(int64_t n, float scale) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random_engine) * scale;
  return x;
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

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
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

// The trajectories of tests/golden/lowrank.bin (tests/support/peers/lowrank.py describes the
// content).
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

/// A rows x cols matrix with singular values decreasing by the factor `fall`, plus a part outside
/// any subspace.
std::vector<float> falling(int64_t rows, int64_t cols, int terms, double fall) {
  std::vector<float> g = normals(rows * cols, 1e-6f);
  double size = 1.0;
  for (int t = 0; t < terms; ++t, size *= fall) {
    const auto u = normals(rows, 1.0f), v = normals(cols, 1.0f);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        g[static_cast<size_t>(i * cols + j)] +=
            static_cast<float>(size) * u[static_cast<size_t>(i)] * v[static_cast<size_t>(j)];
      }
    }
  }
  return g;
}

/// The Gram matrix split in several ways; A v = lambda v, orthonormal vectors, descending values,
/// and the same bits everywhere.
void check_subspace(const std::string& isa, std::vector<std::vector<float>>& first) {
  struct Shape {
    int64_t rows, cols, rank;
  };
  size_t which = 0;
  random_engine.seed(5);
  for (const Shape shape : {Shape{5, 9, 3}, Shape{40, 70, 8}, Shape{130, 37, 37}, Shape{64, 64, 5},
                            Shape{540, 560, 6}}) {
    const bool tall = shape.rows >= shape.cols;
    const int64_t n = std::min(shape.rows, shape.cols);
    const auto values =
        falling(shape.rows, shape.cols, n > 512 ? 12 : static_cast<int>(n), n > 512 ? 0.4 : 0.9);
    const cpu::GradRows g{values.data(), 0, shape.rows, shape.cols, 2.0f};
    std::vector<double> a(static_cast<size_t>(n * n)), b(a.size());
    cpu::gram(g, tall, 0, n, a.data());
    const int64_t cut = n / 3 + 1;
    cpu::gram(g, tall, 0, cut, b.data());
    cpu::gram(g, tall, cut, n, b.data());
    check(a == b, isa + " gram in parts");
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i && n < 200; ++j) {
        double sum = 0.0;
        for (int64_t c = 0; c < (tall ? shape.rows : shape.cols); ++c) {
          const auto at = [&](int64_t x) {
            return static_cast<double>(
                2.0f * values[static_cast<size_t>(tall ? c * shape.cols + x : x * shape.cols + c)]);
          };
          sum += at(i) * at(j);
        }
        check(a[static_cast<size_t>(i * n + j)] == sum, isa + " gram");
      }
    }
    std::vector<float> p(static_cast<size_t>(n * shape.rank));
    const auto backwards = [](int64_t count, const cpu::Body& body) {
      for (int64_t end = count; end > 0; end -= std::min<int64_t>(end, 7)) {
        body(std::max<int64_t>(0, end - 7), end);
      }
    };
    std::vector<float> other(p.size());
    auto copy = b;
    check(cpu::leading_vectors(b.data(), n, shape.rank, p.data()) &&
              cpu::leading_vectors(copy.data(), n, shape.rank, other.data(), backwards),
          isa + " leading vectors");
    check(same(p, other), isa + " leading vectors in parts");
    double before = 1e300, largest = 0.0, worst = 0.0, skew = 0.0;
    bool falls = true;
    for (int64_t k = 0; k < shape.rank; ++k) {
      std::vector<double> image(static_cast<size_t>(n));
      double lambda = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          image[static_cast<size_t>(i)] +=
              a[static_cast<size_t>(std::max(i, j) * n + std::min(i, j))] *
              p[static_cast<size_t>(j * shape.rank + k)];
        }
        lambda += image[static_cast<size_t>(i)] * p[static_cast<size_t>(i * shape.rank + k)];
      }
      falls = falls && lambda <= before * (1 + 1e-6);
      before = lambda;
      if (k == 0) largest = lambda;
      for (int64_t i = 0; i < n; ++i)
        worst = std::max(worst, std::fabs(image[static_cast<size_t>(i)] -
                                          lambda * p[static_cast<size_t>(i * shape.rank + k)]) /
                                    largest);
      for (int64_t j = 0; j <= k; ++j) {
        double dot = j == k ? -1.0 : 0.0;
        for (int64_t i = 0; i < n; ++i)
          dot += static_cast<double>(p[static_cast<size_t>(i * shape.rank + k)]) *
                 p[static_cast<size_t>(i * shape.rank + j)];
        skew = std::max(skew, std::fabs(dot));
      }
    }
    check(falls, isa + " eigenvalues fall");
    check(worst < 1e-6 && skew < 1e-6, isa + " eigenvectors of n = " + std::to_string(n) + ": " +
                                           std::to_string(worst * 1e6) + "e-6, " +
                                           std::to_string(skew * 1e6) + "e-6");
    if (first.size() <= which) first.push_back(p);
    check(same(p, first[which++]), isa + " subspace against the baseline");
  }
  std::vector<double> zero(16, 0.0), bad(16, 0.0);
  std::vector<float> p(8);
  bad[8] = NAN;
  check(cpu::leading_vectors(zero.data(), 4, 2, p.data()) && p[0] == 1.0f && p[3] == 1.0f &&
            p[1] == 0.0f,
        isa + " of nothing");
  check(!cpu::leading_vectors(bad.data(), 4, 2, p.data()), isa + " of no number");
}

}  // namespace

int main() {
  check_values();
  check_orders();
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
