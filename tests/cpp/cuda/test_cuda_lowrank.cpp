// The low-rank kernels of csrc/cuda in the emulator: the bits of cpu/matrices/lowrank.cpp.
#include "cuda_emulator.h"

#include "cuda/matrices/lowrank.cu"
#include "lowrank_compare.h"

namespace lowbit {
namespace {

/// Tall and not tall, with rows that end inside tiles and sums that end inside strips; then parts.
std::vector<MatrixSpec> shapes(bool fira) {
  std::vector<MatrixSpec> specs = {{70, 40, 8},  {40, 70, 8},  {33, 33, 5},   {9, 300, 1},
                                   {100, 40, 3}, {100, 7, 1},  {130, 68, 20}, {66, 132, 13},
                                   {70, 69, 66}, {69, 70, 66}, {2, 600, 1},   {600, 2, 1}};
  for (MatrixSpec& spec : specs) spec.fira = spec.given = fira;
  return specs;
}

template <class Change>
std::vector<MatrixSpec> with(std::vector<MatrixSpec> specs, const Change& change) {
  for (size_t i = 0; i < specs.size(); ++i) change(specs[i], static_cast<int>(i));
  return specs;
}

void test_formats() {
  for (const bool fira : {false, true}) {
    const std::string what = fira ? "fira: " : "apollo: ";
    const auto differ = [&](const char* how, LowRankOptions o, const auto& change) {
      check(lowrank_differ(with(shapes(fira), change), o) == 0, what + how);
    };
    differ("as it is", {.steps = 4}, [](MatrixSpec&, int) {});
    for (int grad = 0; grad < grad_count(); ++grad) {
      differ(grad_dtype(grad), {}, [&](MatrixSpec& s, int) { s.grad = grad; });
    }
    for (int param = 0; param < param_count(); ++param) {
      std::vector<MatrixSpec> few = shapes(fira);
      few.resize(4);
      for (MatrixSpec& spec : few) spec.param = param_info(param).name, spec.grad = param % 2;
      check(lowrank_differ(few, {}) == 0, what + param_info(param).name);
    }
    differ("one scale", {}, [](MatrixSpec& s, int) { s.by_tensor = true; });
    differ("no limiter", {}, [](MatrixSpec& s, int) { s.limits = false; });
    differ("a norm that grows", {.steps = 3, .size = 30.0f},
           [](MatrixSpec& s, int) { s.maximize = true; });
    differ("P is given", {}, [](MatrixSpec& s, int) { s.given = true; });
    differ("a scaled gradient", {.grad_scale = 3.0f}, [](MatrixSpec&, int) {});
    differ("lr = 0", {.rate = 0.0}, [](MatrixSpec&, int) {});
    differ("found_inf", {.found_inf = 1.0f}, [](MatrixSpec&, int) {});
    differ("huge gradients", {.size = 1e36f}, [](MatrixSpec&, int) {});
    differ("tiny gradients", {.size = 1e-38f}, [](MatrixSpec&, int) {});
    for (const int odd : {1, 20}) {
      differ("odd gradients", {.odd = odd}, [](MatrixSpec& s, int i) {
        s.param = i % 2 ? "float32" : "bfloat16_kahan", s.by_tensor = i % 3 == 0;
      });
    }
  }
}

/// Rows of a larger matrix: their offset determines P and the random bits.
void test_parts() {
  std::vector<MatrixSpec> specs;
  for (const bool fira : {false, true}) {
    for (const int64_t begin : {0, 7, 39, 64}) {
      for (const int64_t cols : {50, 101}) {
        MatrixSpec spec{begin == 39 ? 0 : 9 + begin, cols, begin == 7 ? 9 : 2};
        spec.begin = begin, spec.whole = 100, spec.fira = spec.given = fira;
        specs.push_back(spec);
      }
    }
  }
  check(lowrank_differ(specs) == 0, "parts of matrices");
}

/// More matrices than one launch, and strips of rows that end inside a matrix.
void test_sizes() {
  std::vector<MatrixSpec> many;
  for (int i = 0; i < 150; ++i) {
    MatrixSpec spec{1 + i % 9, 2 + i % 7, 1 + i % 4};
    spec.fira = spec.given = i % 3 == 0, spec.by_tensor = i % 5 == 0, spec.limits = i % 4 != 0;
    spec.param = i % 2 ? "float32" : "bfloat16_split8";
    many.push_back(spec);
  }
  check(lowrank_differ(many, {}) == 0, "many matrices");
  MatrixSpec strips{2100, 8, 2}, one{300, 20, 1};
  strips.whole = one.whole = 7, strips.begin = one.begin = 5;  // not tall
  check(lowrank_differ({strips, one}, {}) == 0, "strips");
}

}  // namespace
}  // namespace lowbit

int main(int argc, char** argv) {
  const auto asked = [&](const char* part) { return argc < 2 || std::strcmp(argv[1], part) == 0; };
  if (asked("formats")) lowbit::test_formats();
  for (const bool backwards : {false, true}) {
    emulator::machine.backwards = backwards;
    if (asked("parts")) lowbit::test_parts();
    if (asked("sizes")) lowbit::test_sizes();
  }
  check(emulator::races::reports == 0, "no two threads of a block race");
  return finish();
}
