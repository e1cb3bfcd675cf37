// The launches of cuda_emulator.h, where a simulator runs the PTX of the kernels instead of the
// emulator. Kernels are compiled for the host too, but only for their names.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "simulator/simulator.h"

namespace emulator {

/// What was simulated so far.
struct Simulated {
  unsigned long long launches = 0, instructions = 0;
  ~Simulated() { std::printf("%llu launches, %llu instructions\n", launches, instructions); }
};
inline Simulated simulated;

/// The name of a kernel, which is that of its PTX: both compilers follow the same ABI.
inline const char* name_of(const void* kernel) {
  Dl_info found;
  if (dladdr(kernel, &found) == 0 || found.dli_sname == nullptr) {
    std::fprintf(stderr, "a kernel without a name\n");
    std::exit(2);
  }
  return found.dli_sname;
}

template <class Machine, class... Expected, class... Given>
void simulate(const Machine& size, void (*kernel)(Expected...), const Given&... given) {
  std::vector<simulator::Argument> arguments;
  size_t end = 0;
  const auto add = [&](const void* at, size_t bytes, size_t alignment) {
    end = (end + alignment - 1) / alignment * alignment;
    arguments.push_back({at, bytes, end});
    end += bytes;
  };
  (add(&static_cast<const Expected&>(given), sizeof(Expected), alignof(Expected)), ...);
  simulator::watch(moves);
  ++simulated.launches, ++machine.launches;
  simulated.instructions += simulator::launch(name_of(reinterpret_cast<const void*>(kernel)),
                                              size.gridDim.x, size.blockDim.x, arguments);
  simulator::watch(nullptr);
}

}  // namespace emulator
