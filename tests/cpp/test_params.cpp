// Parameter formats: every 16-bit value survives, nearest equals the nearest by brute force,
// stochastic rounding has the promised probabilities (all 65536 random values are drawn),
// corrections stay within their bounds, and split formats give FlashOptim's numbers.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "core/registry.h"
#include "usable_main.h"

namespace {

using namespace lowbit;

std::mt19937 random_engine(20240229);
uint32_t draw32() { return static_cast<uint32_t>(random_engine()); }

std::string hex(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", bits);
  return text;
}

template <class F>
struct Stored {
  typename F::Storage value;
  typename F::Compensation compensation;
};

template <class F>
Stored<F> store(float x, uint32_t random16 = 0) {
  Stored<F> s{};
  s.value = F::store(x, random16, s.compensation);
  return s;
}

template <class F>
float load(const Stored<F>& s) {
  return F::load(s.value, s.compensation);
}

template <class F>
constexpr bool kHalf = F::kDtype[0] == 'f';
template <class F>
constexpr bool kKeeps = F::kCompensationDtype[0] != '\0';
template <class F>
constexpr uint32_t kInfinity = kHalf<F> ? 0x7c00u : 0x7f80u;

/// The value of a 16-bit pattern, from its definition.
template <class F>
double value_of(uint32_t pattern) {
  const int fraction_bits = kHalf<F> ? 10 : 7, bias = kHalf<F> ? 15 : 127;
  const int field = static_cast<int>((pattern & 0x7fffu) >> fraction_bits);
  const int fraction = static_cast<int>(pattern & ((1u << fraction_bits) - 1u));
  const int significand = field ? fraction + (1 << fraction_bits) : fraction;
  const double v = std::ldexp(significand, (field ? field : 1) - bias - fraction_bits);
  return pattern & 0x8000u ? -v : v;
}

/// Positive float32 values at which rounding can go wrong, and random ones.
std::vector<float> samples() {
  std::vector<float> all;
  for (int i = 0; i < 200000; ++i) {
    const float x = bits_float(draw32() & 0x7fffffffu);
    if (std::isfinite(x)) all.push_back(x);
    all.push_back(bits_float(0x32000000u + draw32() % 0x16000000u));  // 2^-27 .. 2^17
  }
  return all;
}

/// Every pattern with zero compensation survives load and store.
template <class F>
void survives() {
  bool good = true;
  const uint32_t nan = kHalf<F> ? 0x7e00u : 0x7fc0u;
  for (uint32_t pattern = 0; pattern < 0x10000u && good; ++pattern) {
    Stored<F> first{static_cast<uint16_t>(pattern), {}};
    const bool is_nan = (pattern & 0x7fffu) > kInfinity<F>;
    const float x = load(first);
    good &= is_nan ? std::isnan(x)
            : (pattern & 0x7fffu) == kInfinity<F>
                ? std::isinf(x) && std::signbit(x) == bool(pattern >> 15)
                : double(x) == value_of<F>(pattern) && std::signbit(x) == bool(pattern >> 15);
    for (uint32_t random16 : {0u, 0x8000u, 0xffffu}) {
      const Stored<F> again = store<F>(x, random16);
      good &= again.value == (is_nan ? nan : pattern);
      if constexpr (kKeeps<F>) good &= again.compensation == 0;
    }
    check(good, std::string(F::kName) + " " + hex(pattern) + " does not survive");
  }
}

/// The nearest of all finite values, or infinity from half a step beyond the largest; ties to even.
template <class F>
uint32_t brute_force(double x) {
  uint32_t low = 0, high = kInfinity<F>;  // value_of(infinity) is the next power of two, as needed
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value_of<F>(middle) <= x ? low : high) = middle;
  }
  if (x >= value_of<F>(high)) return high;
  const double below = x - value_of<F>(low), above = value_of<F>(high) - x;
  if (below == above) return low & 1u ? high : low;
  return below < above ? low : high;
}

template <class F>
void is_nearest() {
  bool good = true;
  const auto one = [&](float x) {
    const uint32_t want = brute_force<F>(x);
    if (good && (store<F>(x).value != want || store<F>(-x).value != (want | 0x8000u))) {
      check(good = false, std::string(F::kName) + " is not the nearest at " + hex(float_bits(x)));
    }
  };
  for (float x : samples()) one(x);
  for (uint32_t pattern = 0; pattern < kInfinity<F>; ++pattern) {  // midpoints and their neighbors
    const double middle = (value_of<F>(pattern) + value_of<F>(pattern + 1)) / 2;
    const float x = static_cast<float>(middle);
    one(x);
    one(std::nextafter(x, 0.0f));
    if (x < 3.4e38f) one(std::nextafter(x, 3.4e38f));
  }
  check(good, std::string(F::kName) + " nearest");
}

/// The mean over all random values is x to 1/65536 of a step (exactly, unless x has bits below
/// that), only neighbors occur, and finite values stay finite.
template <class F>
void is_unbiased() {
  std::vector<float> at = {1.5f, 0.02f, 3e-5f, 1e-6f, 6.1e-5f, 2e-7f, 1e-8f, 60000.0f};
  for (int i = 0; i < 40; ++i) at.push_back(bits_float(0x33000000u + draw32() % 0x14700000u));
  for (float x : at) {
    const uint32_t low = [&] {
      uint32_t l = 0;
      while (l + 1 < kInfinity<F> && value_of<F>(l + 1) <= x) ++l;
      return l;
    }();
    const double step = value_of<F>(low + 1) - value_of<F>(low);
    uint32_t ups = 0;
    bool good = true;
    for (uint32_t r = 0; r < 0x10000u; ++r) {
      const uint32_t got = store<F>(x, r).value, mirrored = store<F>(-x, r).value;
      ups += got == low + 1;
      good &= (got == low || got == low + 1) && mirrored == (got | 0x8000u);
    }
    const double error = ups / 65536.0 - (x - value_of<F>(low)) / step;
    const bool exact = std::fmod(double(x) / step * 65536.0, 1.0) == 0.0;
    good &= exact ? error == 0.0 : std::fabs(error) <= 0.5 / 65536.0;
    check(good, std::string(F::kName) + " is biased at " + hex(float_bits(x)));
  }
  for (float x : {65519.0f, 65520.0f, 1e30f, 3.4e38f, bits_float(0x7f7fffffu)}) {
    for (uint32_t r : {0u, 1u, 0x7fffu, 0xffffu}) {
      const uint32_t got = store<F>(x, r).value;
      check(got < kInfinity<F> && store<F>(-x, r).value == (got | 0x8000u),
            std::string(F::kName) + " makes " + hex(float_bits(x)) + " infinite");
    }
  }
}

template <class F>
void specials() {
  const float infinity = bits_float(kInfinityBits);
  bool good = true;
  for (uint32_t nan : {0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x7fffffffu, 0xff800001u}) {
    for (uint32_t r : {0u, 0xffffu}) {
      const Stored<F> s = store<F>(bits_float(nan), r);
      good &= s.value == (kHalf<F> ? 0x7e00u : 0x7fc0u);
      if constexpr (kKeeps<F>) good &= s.compensation == 0;
    }
  }
  for (float x : {infinity, -infinity}) {
    const Stored<F> s = store<F>(x, 0xffffu);
    good &= load(s) == x;
    if constexpr (kKeeps<F>) good &= s.compensation == 0;
  }
  if constexpr (kHalf<F> && !F::kRandom) {
    const Stored<F> s = store<F>(70000.0f);
    good &= load(s) == infinity;
    if constexpr (kKeeps<F>) good &= s.compensation == 0;
  }
  check(good, std::string(F::kName) + " specials");
}

/// Over [1, 2), every `stride`-th float32: the largest error in steps of float32. For random
/// exponents: the largest error, as a share of half a step of the word, beyond the resolution of
/// float32 and of the correction's `grid`. Also checks that storing a loaded value again does not
/// change it.
template <class F>
void keeps(double most_steps, double most_share, double grid = 0.0, uint32_t stride = 7) {
  double worst = 0.0;
  bool same_word = true;
  for (uint32_t i = 0; i < (1u << 23); i += stride) {
    const float x = bits_float(0x3f800000u + i);
    const Stored<F> s = store<F>(x);
    worst = std::fmax(worst, std::fabs(double(load(s)) - double(x)) * 0x1p23);
    same_word &= s.value == (kHalf<F> ? half_nearest(x) : bfloat16_nearest(x));
  }
  check(worst <= most_steps,
        std::string(F::kName) + " loses " + std::to_string(worst) + " float32 steps in [1, 2)");
  check(same_word, std::string(F::kName) + " does not store the nearest");
  double share = 0.0;
  bool stable = true;
  for (int i = 0; i < 400000; ++i) {
    const uint32_t range = kHalf<F> ? 0x47000000u - 0x30000000u : 0x7f000000u;
    float x = bits_float((kHalf<F> ? 0x30000000u : 0u) + draw32() % range);
    if (draw32() & 1u) x = -x;
    const Stored<F> s = store<F>(x);
    const float back = load(s);
    // Half a step of the stored value, away from zero, and the resolution of float32 itself.
    const uint32_t pattern = s.value & 0x7fffu;
    const double half = (value_of<F>(pattern + 1) - value_of<F>(pattern)) / 2;
    const float a = std::fabs(x);
    const double float_step = double(std::nextafter(a, bits_float(kInfinityBits))) - double(a);
    const double error = std::fabs(double(back) - double(x));
    share = std::fmax(share, (error - float_step - grid / 2) / half);
    // The midpoint of two words may go to the other one, whose half step is up to twice as large.
    const double moved = std::fabs(double(load(store<F>(back))) - double(back));
    stable &= moved <= 2 * most_share * half + float_step + grid;
  }
  check(share <= most_share,
        std::string(F::kName) + " loses " + std::to_string(share) + " of half a step");
  check(stable, std::string(F::kName) + " is not stable when stored again");
}

/// Updates too small for the word add up, in both directions. Each store may add `loss` to the
/// error.
template <class F>
void accumulates(double loss) {
  const float u = kHalf<F> ? 0x1p-14f : 0x1p-11f;
  Stored<F> s{};
  s.value = store<F>(1.0f).value;
  bool good = true;
  int stores = 0;
  const auto near = [&](int i) {
    return std::fabs(double(load(s)) - (1.0 + double(i) * double(u))) <= ++stores * loss;
  };
  for (int i = 1; i <= 64; ++i) {
    s = store<F>(load(s) + u);
    good &= near(i);
  }
  for (int i = 63; i >= 0; --i) {
    s = store<F>(load(s) - u);
    good &= near(i);
  }
  check(good, std::string(F::kName) + " does not accumulate small updates");
}

/// The word is the nearest, and the mean of its correction over all random values is the exact
/// share of half a step.
template <class F>
void splits_unbiased() {
  for (float x : {1.5f, 0.7654321f, 0.02f, -1.2345f, 3e-5f, -7.7e20f, 1.0042e-39f}) {
    const uint16_t word = store<F>(x).value;
    const double p = value_of<F>(word);
    const uint32_t magnitude = word & 0x7fffu;
    const double half = (value_of<F>(magnitude + 1) - value_of<F>(magnitude)) / 2;
    double sum = 0.0;
    bool good = word == bfloat16_nearest(x);
    for (uint32_t r = 0; r < 0x10000u; ++r) {
      const Stored<F> s = store<F>(x, r);
      good &= s.value == word;
      sum += s.compensation;
    }
    // Half of 1/65536, and the float32 rounding of share * 127.
    const double error = std::fabs(sum / 65536.0 - (double(x) - p) / half * 127.0);
    check(good && error <= 0.5 / 65536.0 + 0x1p-17,
          std::string(F::kName) + " is biased at " + std::to_string(x));
  }
}

/// arXiv:2010.06192 as published, y in float32: the same words and compensations.
template <class F, class Word>
void is_the_papers() {
  bool good = true;
  None none;
  for (int run = 0; run < 200; ++run) {
    uint16_t w = Word::store(bits_float(0x3c000000u + draw32() % 0x04000000u), 0, none), c = 0;
    Stored<F> s{w, 0};
    for (int i = 0; i < 50 && good; ++i) {
      // An update of few bits, so that u - c and w + y are exact in float32 in both orders.
      const float u = std::ldexp(static_cast<float>(draw32() % 15u) - 7.0f, kHalf<F> ? -20 : -17);
      const float y = u - Word::load(c, none);
      const float sum = Word::load(w, none) + y;
      const uint16_t next = Word::store(sum, 0, none);
      c = Word::store((Word::load(next, none) - Word::load(w, none)) - y, 0, none);
      w = next;
      s = store<F>(load(s) + u);
      good &= s.value == w && Word::load(s.compensation, none) == Word::load(c, none);
    }
  }
  check(good, std::string(F::kName) + " is not the compensated sum of arXiv:2010.06192");
}

/// The integers after "name": [ in a JSON object of arrays.
std::vector<int64_t> golden(const std::string& text, const std::string& name) {
  std::vector<int64_t> all;
  const size_t at = text.find('"' + name + "\": [");
  if (at == std::string::npos) return all;
  const size_t begin = text.find('[', at) + 1;
  std::istringstream numbers(text.substr(begin, text.find(']', begin) - begin));
  for (std::string number; std::getline(numbers, number, ',');) all.push_back(std::stoll(number));
  return all;
}

template <class F>
void is_flashoptims(const std::string& text) {
  const std::string name = F::kName;
  const auto x = golden(text, "x"), stored = golden(text, name + "_stored"),
             compensation = golden(text, name + "_extra"), weight = golden(text, name + "_weight");
  check(x.size() == 88 && stored.size() == 88 && compensation.size() == 88 && weight.size() == 88,
        name + " golden arrays");
  for (size_t i = 0; i < x.size() && i < weight.size(); ++i) {
    const Stored<F> s = store<F>(bits_float(static_cast<uint32_t>(x[i])));
    bool good = s.value == stored[i] || x[i] == kCanonicalNan;  // FlashOptim writes another NaN
    if ((s.value & 0x7fffu) >= kInfinity<F>) {
      good &= s.compensation == 0;  // FlashOptim writes -127
    } else {
      good &= s.compensation == compensation[i] &&
              load(s) == bits_float(static_cast<uint32_t>(weight[i]));
    }
    check(good, name + " of " + hex(static_cast<uint32_t>(x[i])) + " is not FlashOptim's");
  }
}

template <class... F>
void names(Types<F...>) {
  std::string all;
  for (const char* name : {F::kName...}) all += std::string(name) + " ";
  check(all ==
            "float32 bfloat16 bfloat16_stochastic float16 float16_stochastic bfloat16_kahan "
            "float16_kahan bfloat16_split8 bfloat16_split16 float16_split8 float16_split16 "
            "bfloat16_split8_stochastic ",
        "the position of a format is its index: append only");
}

template <class... F>
void of_all(Types<Float32Param, F...>) {
  (survives<F>(), ...);
  (specials<F>(), ...);
}

}  // namespace

int run_tests() {
  names(ParamFormats{});
  of_all(ParamFormats{});
  is_nearest<BFloat16Nearest>();
  is_nearest<Float16Nearest>();
  is_unbiased<BFloat16Stochastic>();
  is_unbiased<Float16Stochastic>();
  splits_unbiased<BFloat16Split8Stochastic>();
  keeps<BFloat16Split8>(258, 0.5 / 127);
  keeps<BFloat16Split16>(1, 0.5 / 32767);
  keeps<Float16Split8>(32, 0.5 / 127);
  keeps<Float16Split16>(0, 0.5 / 32767);
  // c has 8 significant bits below half a step of w, and no step finer than the type's smallest.
  keeps<BFloat16Kahan>(64, 0x1p-9, 0x1p-133);
  keeps<Float16Kahan>(1, 0x1p-12, 0x1p-24);
  accumulates<BFloat16Kahan>(0x1p-17);
  accumulates<Float16Kahan>(0x1p-23);
  accumulates<BFloat16Split8>(0x1p-8 / 254 + 0x1p-23);
  accumulates<BFloat16Split16>(0x1p-23);
  accumulates<Float16Split8>(0x1p-11 / 254 + 0x1p-23);
  accumulates<Float16Split16>(0);
  is_the_papers<BFloat16Kahan, BFloat16Nearest>();
  is_the_papers<Float16Kahan, Float16Nearest>();
  std::ifstream file(LOWBIT_GOLDEN "/flashoptim_split.json");
  std::stringstream text;
  text << file.rdbuf();
  is_flashoptims<BFloat16Split8>(text.str());
  is_flashoptims<BFloat16Split16>(text.str());
  is_flashoptims<Float16Split8>(text.str());
  is_flashoptims<Float16Split16>(text.str());
  return finish();
}
