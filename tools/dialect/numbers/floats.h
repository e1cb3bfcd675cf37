// Tensors of floating-point numbers: from the dtype of a file to float32, and back.
#pragma once

#include <memory>
#include <string>

#include "dialect/model/model.h"
#include "dialect/numbers/report.h"

namespace lowbit::ckpt {

/// The values of a float32, bfloat16, float16 or float64 leaf. Any other dtype is an error when
/// they are read.
std::shared_ptr<Floats> floats_of(const Leaf& leaf);
/// The same values of a float64 leaf; `error` receives what rounding to float32 does to what is
/// read.
std::shared_ptr<Floats> rounded_floats(const Leaf& leaf, std::shared_ptr<RoundingError> error);
/// Values as float32 elements.
std::shared_ptr<Source> float32_source(std::shared_ptr<Floats> values);
/// Values rounded to the nearest bfloat16. `report` receives the errors while the source is read;
/// it may be null, and must outlive the source.
std::shared_ptr<Source> bfloat16_source(std::shared_ptr<Floats> values, StateReport* report);
/// Elements of `width` bytes that are held in memory.
std::shared_ptr<Source> constant_source(std::string bytes, int width);

/// Adds up what rounding does to values, into a report.
class ErrorSum {
 public:
  explicit ErrorSum(StateReport* report) : report_(report) {}
  /// False without a report: the caller need not dequantize what it wrote.
  bool wanted() const { return report_ != nullptr; }
  void add(const float* before, const float* after, uint64_t count);

 private:
  StateReport* report_;
};

}  // namespace lowbit::ckpt
