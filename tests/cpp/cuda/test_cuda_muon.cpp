// Muon's kernels of csrc/cuda in the emulator: the bits of cpu/matrices/matmul.cpp and
// cpu/matrices/row_moment.cpp.
#include "cuda_emulator.h"

#include "cuda/matrices/muon.cu"
#include "muon_compare.h"

namespace lowbit {
namespace {

/// Wide and tall, with sides that end inside tiles, passes and eights; from one step to three.
std::vector<MuonSpec> shapes() {
  return {{1, 1, 1, 1},     {1, 1, 40, 2},   {1, 40, 1, 2},   {1, 16, 16, 3},  {1, 64, 64, 1},
          {1, 65, 130, 2},  {1, 130, 65, 2}, {1, 72, 136, 3}, {1, 136, 72, 3}, {1, 200, 210, 1},
          {5, 9, 24, 2},    {5, 24, 9, 2},   {3, 70, 80, 2},  {3, 80, 70, 1},  {70, 8, 8, 1},
          {2, 33, 4300, 1}, {2, 4300, 33, 1}};
}

template <class Change>
std::vector<MuonSpec> with(std::vector<MuonSpec> specs, const Change& change) {
  for (MuonSpec& spec : specs) change(spec);
  return specs;
}

void test_shapes() {
  check(muon_differ(shapes(), newton_schulz_differs) == 0, "Newton-Schulz");
  check(muon_differ(with(shapes(), [](MuonSpec& s) { s.span = 110; }), newton_schulz_differs) == 0,
        "values that vanish");
  check(muon_differ(shapes(), rows_differ) == 0, "rows");
  std::vector<MuonSpec> products = {{1, 1, 1},     {6, 16, 256}, {7, 17, 257}, {5, 33, 3},
                                    {191, 49, 30}, {193, 9, 2},  {40, 171, 9}, {33, 13, 1025}};
  check(muon_differ(products, product_differs) == 0, "products");
  check(muon_differ(with(products, [](MuonSpec& s) { s.offset = 3; }), product_differs) == 0,
        "products of what is not aligned");
}

/// Sizes, offsets, and values that are not finite.
void test_inputs() {
  const std::vector<MuonSpec> few = {{2, 30, 72}, {2, 72, 30}, {1, 66, 66}, {1, 16, 24, 0}};
  const auto differ = [&](const char* how, const auto& change) {
    check(muon_differ(with(few, change), newton_schulz_differs) == 0, how);
  };
  differ("not aligned", [](MuonSpec& s) { s.offset = 1; });
  differ("tiny", [](MuonSpec& s) { s.shift = -120; });
  differ("huge", [](MuonSpec& s) { s.shift = 127; });
  differ("a factor of the norm", [](MuonSpec& s) { s.factor = 1.01; });
  differ("less than eps", [](MuonSpec& s) { s.shift = -40, s.eps = 1.0; });
  for (const uint16_t odd : {0x7f80, 0xff80, 0x7fc1, 0xffff})
    differ("not finite", [&](MuonSpec& s) { s.odd = odd; });
  for (const uint16_t odd : {0x7f80, 0x7fc1})
    check(muon_differ(with(few, [&](MuonSpec& s) { s.odd = odd; }), rows_differ) == 0,
          "rows that are not finite");
  differ("one that is by far the largest", [](MuonSpec& s) { s.shift = -20, s.odd = 0x7f00; });
  check(muon_differ(with(few, [](MuonSpec& s) { s.offset = 1; }), rows_differ) == 0,
        "rows that are not aligned");
}

/// The shapes of docs/definitions/muon-design.md's table of bits. Of the two large ones a single
/// Newton-Schulz step: each takes seconds here.
void test_grid() {
  const std::vector<MuonSpec> specs = {{1, 512, 2048, 1}, {1, 2048, 512, 1}, {1, 77, 1000, 5},
                                       {1, 1000, 77, 5},  {8, 48, 160, 5},   {3, 128, 128, 5}};
  check(muon_differ(specs, newton_schulz_differs) == 0, "the shapes of the table");
  check(muon_differ(specs, rows_differ) == 0, "rows of the shapes of the table");
}

}  // namespace
}  // namespace lowbit

int main(int argc, char** argv) {
  const auto asked = [&](const char* part) { return argc < 2 || std::strcmp(argv[1], part) == 0; };
  for (const bool backwards : {false, true}) {
    emulator::machine.backwards = backwards;
    if (asked("matrices")) lowbit::test_shapes();
    if (asked("inputs")) lowbit::test_inputs();
  }
  emulator::machine.backwards = false;
  if (asked("grid")) lowbit::test_grid();
  check(emulator::races::reports == 0, "no two threads of a block race");
  return finish();
}
