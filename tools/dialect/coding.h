// Numbers to codes and back, by the same leaves as the optimizer's step (csrc/cpu).
#pragma once

#include <memory>
#include <string>

#include "dialect/dialect.h"
#include "dialect/model.h"

namespace lowbit::ckpt {

/// What a format of lowbit's catalog is; null where there is none of that name.
struct FormatInfo {
  std::string name;
  int bits, block;  // block: the default length
  bool scaled, is_signed;
  const Dtype *dtype, *scale_dtype;  // of codes and scales; scale_dtype null where there are none
  int scale_numbers;                 // for each block
};
const FormatInfo* find_format(const std::string& name);

/// Decoded values of codes.
std::shared_ptr<Floats> decoded(const Codes& codes);
/// Values that are floating-point numbers in the file (float32, bfloat16, float16, float64).
std::shared_ptr<Floats> floats_of(const Leaf& leaf);
/// Encodes row by row: rows = shape[0] (1 for 0-D), cols the rest. `report` receives the errors
/// while the codes are read (may be null). Reading scales reads the values again: nothing of the
/// tensor's size is held.
Codes encoded(std::shared_ptr<Floats> values, const Shape& shape, const std::string& format,
              int64_t block, StateReport* report);
/// Float32 elements of values.
std::shared_ptr<Source> float32_source(std::shared_ptr<Floats> values);

}  // namespace lowbit::ckpt
