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
  const void* kind;   // the parameter's class in Python
  uint64_t checksum;  // of the addresses and the length: other numbers are not read as addresses
};
constexpr int64_t kPairColumns = sizeof(TensorPair) / sizeof(int64_t);

/// The checksum of a row. It detects tensors that are not a table and rows that were overwritten,
/// not a stale table whose addresses have been freed.
inline uint64_t checksum_of(const TensorPair& row) {
  uint64_t checksum = 0x6c6f776269742e31;  // "lowbit.1"
  const uint64_t words[] = {reinterpret_cast<uint64_t>(row.param),
                            reinterpret_cast<uint64_t>(row.grad), static_cast<uint64_t>(row.numel)};
  for (const uint64_t word : words) {
    checksum = (checksum ^ word) * 0x9e3779b97f4a7c15;
    checksum ^= checksum >> 32;
  }
  return checksum;
}

}  // namespace lowbit
