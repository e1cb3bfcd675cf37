// The library of operators, and what is asked of it as a whole. The other files of this room add
// the schemas of their subjects. They include torch through the LibTorch stable ABI, so one binary
// serves torch 2.11 and later.
#include "ops/ops.h"

#include <sstream>
#include <string>

#include "catalog/json.h"
#include "cpu/step.h"
#include "cuda/library.h"
#include "policy/published.h"

namespace lowbit {
namespace {

/// The words of a text, as JSON.
std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string word; in >> word;) out.push_back(json::text(word));
  return out;
}

std::string catalog() {
  const char* refused = cpu::refused_isa();
  STD_TORCH_CHECK(refused == nullptr, "LOWBIT_ISA=", refused == nullptr ? "" : refused,
                  ": this processor runs ", cpu::usable_isas());
  json::Fields all = catalog_fields();
  for (auto& field : policy_fields()) all.push_back(std::move(field));
  all.emplace_back("isas", json::array(words(cpu::usable_isas())));
  all.emplace_back("isa", json::text(cpu::kernels().isa));
  all.emplace_back("cuda", json::array(words(LOWBIT_CUDA_BUILT)));
  return json::object(all);
}

/// Why the CUDA library cannot be used, or nothing.
std::string cuda_error() {
  const char* error = cuda::library().error;
  return error == nullptr ? "" : error;
}

void set_isa(std::string name) {
  STD_TORCH_CHECK(cpu::set_isa(name.c_str()), "lowbit::set_isa: this processor runs ",
                  cpu::usable_isas(), ", not '", name, "'");
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY(lowbit, m) {
  m.def("catalog() -> str");
  m.def("cuda_error() -> str");
  m.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("catalog", LOWBIT_OPERATOR(catalog));
  m.impl("cuda_error", LOWBIT_OPERATOR(cuda_error));
  m.impl("set_isa", LOWBIT_OPERATOR(set_isa));
}
