// Runs kernels of a PTX file in GPGPU-Sim, on the memory of this process. Its headers clash with
// CUDA's names for the host, so only simulator.cpp includes them.
#pragma once

#include <cstddef>
#include <vector>

namespace simulator {

/// A kernel argument and where it begins among all.
struct Argument {
  const void* at;
  size_t bytes, offset;
};

/// Reads the PTX file that LOWBIT_PTX names at the first call. Returns the number of instructions
/// that threads executed.
unsigned long long launch(const char* kernel, unsigned blocks, unsigned threads,
                          const std::vector<Argument>& arguments);

/// From now on `seen` is told of each access to this process's memory, until null is given.
void watch(void (*seen)(const void* at, size_t bytes, bool written));

}  // namespace simulator
