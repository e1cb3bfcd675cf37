// Whether the emulator detects mistakes in Muon's kernels (test_cuda_mutations.cpp).
#include "cuda_emulator.h"

static int mutation = 0;
#include "cuda/matrices/muon.cu"
#include "muon_compare.h"
#include "mutations.h"

namespace lowbit {
namespace {

bool steps_differ() {
  return muon_differ({{1, 70, 144, 1},
                      {1, 144, 70, 2},
                      {3, 20, 45, 1},
                      {3, 45, 20, 2},
                      {1, 1, 9000, 1, 6, -20, 0x7f00}},  // the last value is by far the largest
                     newton_schulz_differs) > 0;
}
bool moments_differ() {
  return muon_differ({{2, 70, 40}, {1, 600, 70}, {3, 33, 9}}, rows_differ) > 0;
}
bool products_differ() { return muon_differ({{70, 9, 50}, {3, 80, 33}}, product_differs) > 0; }

const Comparison kComparisons[] = {{steps_differ, "muon_product.cuh muon.cu"},
                                   {moments_differ, "muon_elements.cuh"},
                                   {products_differ, "muon_product.cuh"}};

}  // namespace
}  // namespace lowbit

int main() {
  using namespace lowbit;
  return run_mutations(kComparisons,
                       [](const std::string& mistake) { return mistake.rfind("muon", 0) == 0; });
}
