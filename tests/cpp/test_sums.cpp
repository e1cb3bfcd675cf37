// Vectorized exact sums of rows and of columns equal those of terms added one by one. Numbers
// derived from sums contain one canonical NaN on all processors.
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/column_sums.h"
#include "core/finalize.h"
#include "usable_main.h"

namespace {

using lowbit::ColumnSums;
using lowbit::ExactSum;

void check(bool good, const char* what, int rows, int n, int spread) {
  ::check(good, std::string(what) + ": " + std::to_string(rows) + " rows of " + std::to_string(n) +
                    ", exponents within " + std::to_string(spread));
}

bool same(std::vector<int64_t> a, std::vector<int64_t> b) {
  for (auto* words : {&a, &b}) {
    for (size_t i = 0; i < words->size(); i += ExactSum::kWords) lowbit::exact_carry(&(*words)[i]);
  }
  return a == b;
}

/// Terms whose exponents lie within `spread` below a middle that moves along the rows. Some are
/// zero, some far outside and, with `odd`, some not finite.
class Terms {
 public:
  Terms(int spread, bool odd) : spread_(spread), odd_(odd) {}
  float next(int row) {
    const uint32_t bits = random_();
    const int middle = 130 + (row % 50) - 25;
    int exponent = middle - static_cast<int>(random_() % static_cast<unsigned>(spread_ + 1));
    const uint32_t kind = random_() % 1000;
    if (kind < 20) return 0.0f;
    if (kind < 25) exponent = static_cast<int>(random_() % 255);
    if (odd_ && kind == 30) exponent = 255;
    exponent = exponent < 0 ? 0 : exponent;
    const uint32_t made = (bits & 0x807fffffu) | static_cast<uint32_t>(exponent) << 23;
    float x;
    std::memcpy(&x, &made, sizeof x);
    return x;
  }

 private:
  std::mt19937 random_{7};
  int spread_;
  bool odd_;
};

void columns(int rows, int n, int spread, bool odd) {
  Terms terms(spread, odd);
  std::vector<double> room(static_cast<size_t>(2 * n));
  ColumnSums sums{room.data(), room.data() + n};
  std::vector<int64_t> fast(static_cast<size_t>(n * ExactSum::kWords)), slow(fast),
      row_sum(ExactSum::kWords), row_slow(ExactSum::kWords);
  constexpr int kTogether = ColumnSums::kTogether;
  std::vector<float> x(static_cast<size_t>(kTogether * n));
  for (int r = 0; r < rows; ++r) {
    float* const row = &x[static_cast<size_t>(r % kTogether * n)];
    for (int i = 0; i < n; ++i) {
      row[i] = terms.next(r);
      lowbit::exact_add(row[i], &slow[static_cast<size_t>(i) * ExactSum::kWords]);
      lowbit::exact_add(row[i], row_slow.data());
    }
    lowbit::exact_add(row, n, row_sum.data());
    const int held = r % kTogether + 1;
    if (held < kTogether && r + 1 < rows) continue;
    // The last rows of a shard may begin later, with other columns.
    const int skip = r + 1 == rows ? n / 3 : 0;
    lowbit::add_columns(x.data() + skip, n, held, n - skip, sums,
                        fast.data() + static_cast<size_t>(skip) * ExactSum::kWords);
    for (int k = 0; k < held; ++k) {
      for (int i = 0; i < skip; ++i)
        lowbit::exact_add(x[static_cast<size_t>(k * n + i)],
                          &fast[static_cast<size_t>(i) * ExactSum::kWords]);
    }
  }
  lowbit::flush_columns(sums);
  check(same(fast, slow), "columns", rows, n, spread);
  check(same(row_sum, row_slow), "a row", rows, n, spread);
}

/// A rule whose number is a NaN with a payload, as GPUs produce.
struct Odd {
  static constexpr int kRounds = 1, kNumbers = 1;
  struct Coef {};
  static constexpr int totals(int) { return 0; }
  static void finalize(int, const double*, double, float* numbers, Coef&) {
    numbers[0] = lowbit::bits_float(0x7fffffffu);
  }
};

void nans() {
  const float infinity = lowbit::bits_float(lowbit::kInfinityBits);
  const auto is_canonical = [](float x, const char* what) {
    ::check(lowbit::float_bits(x) == lowbit::kCanonicalNan, what);
  };
  is_canonical(lowbit::moved(infinity, 1.0, 0.5f), "a mean without a limit");
  is_canonical(lowbit::moved(lowbit::bits_float(0xffc00000u), 1.0, 0.5f), "a negative NaN");
  is_canonical(lowbit::moved(lowbit::bits_float(0x7fffffffu), 1.0, 0.5f), "a NaN of a GPU");
  float number = 1.0f;
  Odd::Coef coef;
  lowbit::finalize_round<Odd>(0, nullptr, 1, &number, true, nullptr, coef);
  is_canonical(number, "a number that is a NaN");
}

}  // namespace

int run_tests() {
  nans();
  for (const int spread : {0, 5, 20, 21, 22, 41, 42, 43, 80, 250}) {
    for (const int rows : {1, 2, 255, 256, 257, 700}) {
      for (const int n : {1, 7, 8, 33, 256}) {
        columns(rows, n, spread, false);
        columns(rows, n, spread, true);
      }
    }
  }
  return finish();
}
