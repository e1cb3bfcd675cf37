// A row of the table by which a repeated step gets its parameters and gradients: csrc/python writes
// it from Python's objects, csrc/ops reads it. A tensor [n, kPairColumns] of int64 holds the rows.
#pragma once

#include <cstdint>

namespace lowbit {

struct TensorPair {
  const void *param, *grad;  // addresses of the values
  int64_t numel;             // of both
  uint64_t shape;            // the parameter's, as a hash
  // What else must not change. Types are DLPack's code, bits and lanes; devices are DLPack's too.
  uint32_t param_type, grad_type;
  int32_t device_type, device;
  const void* kind;  // the parameter's class in Python
  // Where the objects of the two tensors are: hints for the processor's caches, and never read.
  static constexpr int kHints = 7;
  const char* hint[kHints];
};
constexpr int64_t kPairColumns = sizeof(TensorPair) / sizeof(int64_t);

}  // namespace lowbit
