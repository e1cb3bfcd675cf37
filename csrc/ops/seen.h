// Tensors that a repeated step does not look at again as long as they are what they were.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/ops.h"

namespace lowbit {

/// Keeps tensors, and knows what they were when they were kept.
class SeenTensors {
 public:
  void see(const Tensors& tensors);
  /// Single int64 numbers on the CPU, whose value must not change either.
  void see_numbers(const Tensors& numbers);
  /// Whether all of them have the memory, length, dtype and contiguity that they had, and numbers
  /// their values. In parallel, since these are thousands of tensors all over memory.
  bool unchanged() const;

 private:
  struct Seen {
    const void* data;
    int64_t numel;
    int32_t dtype;                // torch's own number; Tensor::scalar_type takes 0.1 us
    Device device;                // null, of empty tensors, is an address on all devices
    const char *tensor, *memory;  // hints for the caches
  };
  struct Number {
    const int64_t* at;
    int64_t value;
  };
  Tensors tensors_;
  std::vector<Seen> seen_;
  std::vector<Number> numbers_;
};

}  // namespace lowbit
