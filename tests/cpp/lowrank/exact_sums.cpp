// Exact sums of floats: their words, their values and their parts.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/step.h"
#include "lowrank/lowrank.h"

using namespace lowbit;

namespace {

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

}  // namespace

void check_exact_sums() {
  check_values();
  check_orders();
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
