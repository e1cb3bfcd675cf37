// The choice of kernels for this processor, made once. LOWBIT_ISA in the environment or set_isa
// overrides it.
#include <cstdlib>
#include <cstring>

#include "cpu/step.h"

namespace lowbit::cpu {
namespace {

/// The instruction sets that this processor can run.
struct Isas {
  const Kernels* usable[4];
  int count = 0;
  const Kernels* current = nullptr;
  char names[64] = "";
  const char* refused = nullptr;

  Isas() {
    add(kKernelsBaseline, true);
#if defined(LOWBIT_AVX2)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
    add(kKernelsAvx2, avx2);
#endif
#if defined(LOWBIT_AVX512)
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    add(kKernelsAvx512, avx512);
#endif
#if defined(LOWBIT_AVX512VBMI)
    add(kKernelsAvx512Vbmi, avx512 && __builtin_cpu_supports("avx512vbmi"));
#endif
    const char* forced = std::getenv("LOWBIT_ISA");
    if (forced != nullptr && !set(forced)) refused = forced;
  }

  bool set(const char* name) {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(usable[i]->isa, name) == 0) {
        current = usable[i];
        return true;
      }
    }
    return false;
  }

 private:
  void add(const Kernels& kernels, bool runs) {
    if (!runs) return;
    usable[count++] = &kernels;
    current = &kernels;
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
