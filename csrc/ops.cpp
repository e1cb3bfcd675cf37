// The library of operators, and what is asked of it as a whole. The other ops_*.cpp add the schemas
// of their subjects, or are what several of them share. They are the only C++ that includes torch, through the LibTorch stable ABI, so one
// binary serves torch 2.11 and later.
#include "ops.h"

#include <string>

#include "cpu/step.h"

namespace lowbit {
namespace {

std::string catalog() {
  const char* refused = cpu::refused_isa();
  STD_TORCH_CHECK(refused == nullptr, "LOWBIT_ISA=", refused == nullptr ? "" : refused,
                  ": this processor runs ", cpu::usable_isas());
  return catalog_json();
}

void set_isa(std::string name) {
  STD_TORCH_CHECK(cpu::set_isa(name.c_str()), "lowbit::set_isa: this processor runs ",
                  cpu::usable_isas(), ", not '", name, "'");
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY(lowbit, m) {
  m.def("catalog() -> str");
  m.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("catalog", TORCH_BOX(&lowbit::catalog));
  m.impl("set_isa", TORCH_BOX(&lowbit::set_isa));
}
