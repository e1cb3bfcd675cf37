// Steps every update rule with every state format and parameter format that programs without Python
// can use, from inputs made of integers. Prints a digest of all written bytes for each combination.
// Two processors, or two instruction sets (LOWBIT_ISA), must print the same, and so must one thread
// and several: step_bits [THREADS].
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "catalog/catalog.h"
#include "core/half.h"
#include "core/mean_bins.h"
#include "cpu/mean.h"
#include "cpu/step.h"
#include "libtorch/lowbit/param_state.h"

namespace {

using lowbit::ParamState;

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// A value in [-1, 1), over about twenty binades; sometimes zero, subnormal or far outside.
float value_of(uint64_t key) {
  const uint64_t bits = mixed(key);
  if (bits % 97 == 0) return 0.0f;
  if (bits % 1009 == 0) return 0x1p-140f;
  if (bits % 2003 == 0) return 0x1p40f;
  const uint32_t exponent = 106 + static_cast<uint32_t>(bits >> 40) % 20;
  const uint32_t made = static_cast<uint32_t>(bits >> 32 & 0x80000000u) | exponent << 23 |
                        static_cast<uint32_t>(bits & 0x7fffff);
  float out;
  std::memcpy(&out, &made, sizeof out);
  return out;
}

size_t width_of(const std::string& dtype) {
  if (dtype == "float32") return 4;
  return dtype == "bfloat16" || dtype == "float16" || dtype == "int16" ? 2 : 1;
}

void store(const std::string& dtype, float x, char* at) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (dtype == "float32") {
    std::memcpy(at, &x, 4);
  } else {
    const auto half =
        dtype == "float16" ? lowbit::half_nearest(x) : static_cast<uint16_t>(bits >> 16);
    std::memcpy(at, &half, 2);
  }
}

int64_t threads = 1;

/// The parts of a pass, dealt out to threads as a pool of torch does: each takes a run of them.
void in_threads(int64_t parts, const std::function<void(int64_t, int64_t)>& fn) {
  std::vector<std::thread> others;
  const int64_t runs = std::min(threads, parts);
  for (int64_t t = 1; t < runs; ++t)
    others.emplace_back([&, t] { fn(parts * t / runs, parts * (t + 1) / runs); });
  if (runs > 0) fn(0, parts / runs);
  for (std::thread& other : others) other.join();
}

struct Digest {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  void add(const std::vector<char>& bytes) {
    for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  }
};

std::vector<double> hypers_of(int rule) {
  // In the order of the catalog: a learning rate, then numbers that are valid as a decay, a floor
  // or a power of any rule.
  std::vector<double> hyper(static_cast<size_t>(lowbit::rule_info(rule).hypers), 0.3);
  hyper[0] = 1e-2;
  return hyper;
}

bool run(const std::string& rule, const std::string& state_format, const std::string& dtype,
         const std::string& param_format, uint64_t* digest) {
  const std::vector<int64_t> shape = {14, 301};
  lowbit::StateOptions options;
  options.state_format = state_format, options.param_format = param_format;
  std::vector<std::vector<char>> state;
  std::vector<void*> pointers;
  const auto kept = [&]() -> std::unique_ptr<ParamState> {
    try {
      return std::make_unique<ParamState>(rule, shape, dtype, options);
    } catch (const std::invalid_argument&) {
      return nullptr;  // they do not go together
    }
  }();
  if (kept == nullptr) return false;
  for (const lowbit::StateTensor& t : kept->tensors()) {
    int64_t n = 1;
    for (const int64_t d : t.shape) n *= d;
    state.emplace_back(static_cast<size_t>(n) * width_of(t.dtype));
  }
  for (auto& s : state) pointers.push_back(s.data());
  kept->fresh(pointers);
  const size_t n = static_cast<size_t>(shape[0] * shape[1]), bytes = width_of(dtype);
  std::vector<char> param(n * bytes), grad(n * bytes);
  for (size_t i = 0; i < n; ++i) store(dtype, value_of(i), &param[i * bytes]);
  for (int64_t step = 1; step <= 3; ++step) {
    for (size_t i = 0; i < n; ++i)
      store(dtype, value_of(i + n * static_cast<uint64_t>(step)), &grad[i * bytes]);
    kept->step({param.data(), grad.data(), dtype, pointers, hypers_of(lowbit::find_rule(rule)),
                step, 77, 5, false},
               in_threads);
  }
  Digest all;
  all.add(param);
  for (const auto& s : state) all.add(s);
  *digest = all.hash;
  return true;
}

/// Means of gradients of a dtype, some kept as words on the way: the words and the means.
uint64_t means(int format, int mean_format) {
  constexpr size_t kRows = 12, kElements = 1000;
  const auto size = static_cast<size_t>(lowbit::grad_bytes(format));
  const char* const dtypes[] = {"float32", "bfloat16", "float16"};
  std::vector<char> addends(kRows * kElements * size), mean(kElements * 4), kept(kElements * 8);
  for (size_t i = 0; i < kRows * kElements; ++i)
    store(dtypes[format], value_of(i), &addends[i * size]);
  lowbit::MeanSum sum{};
  sum.words = reinterpret_cast<uint64_t*>(kept.data());
  sum.addends = addends.data(), sum.addend_format = format, sum.mean_format = mean_format;
  sum.width = lowbit::bin_width(kRows), sum.divisor = kRows;
  sum.rows = kRows / 2, sum.stride = sum.n = kElements;
  const auto n = static_cast<int64_t>(kElements);
  lowbit::cpu::add_means(sum, 0, n, lowbit::cpu::kernels());
  sum.addends = addends.data() + kRows / 2 * kElements * size, sum.mean = mean.data();
  lowbit::cpu::add_means(sum, 0, n, lowbit::cpu::kernels());
  Digest all;
  all.add(kept), all.add(mean);
  return all.hash;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) threads = std::stoll(argv[1]);
  int count = 0;
  for (int format = 0; format < lowbit::grad_count(); ++format) {
    for (int mean_format = 0; mean_format < lowbit::grad_count(); ++mean_format, ++count)
      std::printf("means %d %d %016llx\n", format, mean_format,
                  static_cast<unsigned long long>(means(format, mean_format)));
  }
  for (int r = 0; r < lowbit::rule_count(); ++r) {
    std::vector<std::string> states = {"8bit", "7bit", "6bit", "5bit",    "4bit",
                                       "3bit", "2bit", "fp8",  "fp8_e5m2"};
    for (int s = 0; s < lowbit::state_count(); ++s) states.push_back(lowbit::state_info(s).name);
    for (const std::string& state : states) {
      for (int p = 0; p < lowbit::param_count(); ++p) {
        // Every parameter format with 8-bit state, and every state format with the default of each
        // dtype.
        const std::string format = lowbit::param_info(p).name, dtype = lowbit::param_info(p).dtype;
        if (state != "8bit" && format != dtype && format != "bfloat16_stochastic") continue;
        uint64_t digest = 0;
        const std::string rule = lowbit::rule_info(r).name;
        if (!run(rule, state, dtype, format, &digest)) continue;
        std::printf("%s %s %s %016llx\n", rule.c_str(), state.c_str(), format.c_str(),
                    static_cast<unsigned long long>(digest));
        ++count;
      }
    }
  }
  std::fprintf(stderr, "%d combinations\n", count);
  return count > 0 ? 0 : 1;
}
