// The choice of kernels for this processor, made once. LOWBIT_ISA in the environment or set_isa
// overrides it.
#include <cstdlib>
#include <cstring>

#include "cpu/step.h"

namespace lowbit::cpu {
namespace {

/// The instruction sets that this processor can run.
struct Isas {
  Kernels usable[4];
  int count = 0;
  const Kernels* current = nullptr;
  char names[64] = "";
  const char* refused = nullptr;

  Isas() {
    add({kValuesBaseline, kStatesBaseline, kRulesBaseline, "baseline"}, true);
#if defined(LOWBIT_AVX2)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
    add({kValuesAvx2, kStatesAvx2, kRulesAvx2, "avx2"}, avx2);
#endif
#if defined(LOWBIT_AVX512)
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    add({kValuesAvx512, kStatesAvx512, kRulesAvx512, "avx512"}, avx512);
#endif
#if defined(LOWBIT_AVX512VBMI)
    // Byte permutes help state formats alone.
    add({kValuesAvx512, kStatesAvx512Vbmi, kRulesAvx512, "avx512vbmi"},
        avx512 && __builtin_cpu_supports("avx512vbmi"));
#endif
    const char* forced = std::getenv("LOWBIT_ISA");
    if (forced != nullptr && !set(forced)) refused = forced;
  }

  bool set(const char* name) {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(usable[i].isa, name) == 0) {
        current = &usable[i];
        return true;
      }
    }
    return false;
  }

 private:
  void add(const Kernels& kernels, bool runs) {
    if (!runs) return;
    usable[count] = kernels;
    current = &usable[count++];
    if (names[0] != '\0') std::strcat(names, " ");
    std::strcat(names, kernels.isa);
  }
};

Isas& isas() {
  static Isas all;
  return all;
}

}  // namespace

const Kernels& kernels() { return *isas().current; }
const char* usable_isas() { return isas().names; }
const char* refused_isa() { return isas().refused; }
bool set_isa(const char* name) { return isas().set(name); }

}  // namespace lowbit::cpu
