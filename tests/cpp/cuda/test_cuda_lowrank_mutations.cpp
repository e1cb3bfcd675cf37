// Whether the emulator detects mistakes in the low-rank kernels (test_cuda_mutations.cpp).
#include "cuda_emulator.h"

static int mutation = 0;
#include "cuda/matrices/lowrank.cu"
#include "lowrank_compare.h"
#include "mutations.h"

namespace lowbit {
namespace {

/// Small matrices that end inside tiles, for both methods, with the options of every kernel.
std::vector<MatrixSpec> small_specs() {
  std::vector<MatrixSpec> specs = {{70, 40, 9},  {90, 70, 3}, {40, 70, 9},
                                   {21, 300, 1}, {90, 9, 1},  {65, 66, 17}};
  const size_t count = specs.size();
  for (size_t i = 0; i < count; ++i) {
    MatrixSpec spec = specs[i];
    spec.fira = spec.given = true, spec.maximize = i % 2 == 0;
    spec.param = i % 3 == 0 ? "bfloat16_split8" : "bfloat16_stochastic";
    specs.push_back(spec);
    spec.fira = spec.given = false, spec.by_tensor = true, spec.grad = 1;
    specs.push_back(spec);
  }
  specs.push_back({200, 40, 30});
  specs.back().by_tensor = true;
  return specs;
}

/// One matrix at a time: with several, the search for a matrix adds further synchronization of
/// lanes.
bool one_differs() {
  for (const bool fira : {false, true}) {
    for (MatrixSpec spec :
         {MatrixSpec{21, 300, 1}, {300, 21, 1}, {90, 70, 3}, {150, 140, 20}, {70, 140, 9}}) {
      spec.fira = spec.given = fira, spec.by_tensor = !fira && spec.rows == 90;
      if (lowrank_differ({spec}) > 0) return true;
    }
  }
  return false;
}

bool matrices_differ() {
  return lowrank_differ(small_specs(), {.steps = 3}) > 0 ||
         lowrank_differ(small_specs(), {.odd = 3}) > 0 ||
         lowrank_differ(small_specs(), {.grad_scale = 3.0f, .steps = 1, .size = 1e-20f}) > 0;
}

bool parts_differ() {
  std::vector<MatrixSpec> specs;
  for (const bool fira : {false, true}) {
    for (const int64_t cols : {50, 101}) {
      MatrixSpec spec{40, cols, 9};
      spec.begin = 7, spec.whole = 100, spec.fira = spec.given = fira;
      specs.push_back(spec);
    }
  }
  MatrixSpec strips{1100, 4, 2}, one{150, 20, 1};
  strips.whole = one.whole = 3, strips.begin = one.begin = 2;  // not tall
  specs.push_back(strips), specs.push_back(one);
  return lowrank_differ(specs) > 0;
}

bool tables_differ() {
  std::vector<MatrixSpec> many;
  for (int i = 0; i < 70; ++i) {
    MatrixSpec spec{1 + i % 9, 2 + i % 7, 1 + i % 4};
    spec.fira = spec.given = i % 3 == 0, spec.by_tensor = i % 5 == 0, spec.limits = i % 4 != 0;
    many.push_back(spec);
  }
  return lowrank_differ(many) > 0 || lowrank_differ(small_specs(), {.rate = 0.0, .steps = 1}) > 0 ||
         lowrank_differ(small_specs(), {.found_inf = 1.0f, .steps = 1}) > 0;
}

const Comparison kComparisons[] = {
    {matrices_differ, "lowrank_product.cuh lowrank_columns.cuh lowrank_elements.cuh warp_sum.cuh"},
    {one_differs, "lowrank_product.cuh lowrank_elements.cuh"},
    {parts_differ, "lowrank_columns.cuh"},
    {tables_differ, "lowrank.cuh lowrank.cu"}};

}  // namespace
}  // namespace lowbit

int main() {
  using namespace lowbit;
  return run_mutations(kComparisons, [](const std::string& mistake) {
    return mistake.rfind("lowrank", 0) == 0 || mistake.rfind("warp_sum", 0) == 0;
  });
}
