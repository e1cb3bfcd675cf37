// Numbers to codes and back, by the same leaves as the optimizer's step (csrc/cpu).
#pragma once

#include <memory>
#include <string>
#include <vector>

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
  bool measurable;                   // whether a scale may cover more than a block
};
const FormatInfo* find_format(const std::string& name);

/// The values of the codes of a format, at a scale of 1.
std::vector<float> map_of(const std::string& format);

/// Decoded values of codes. Any block length, not only those that an optimizer here steps with.
std::shared_ptr<Floats> decoded(const Codes& codes);
/// The largest magnitudes that some dimensions' elements have: one number for each index of `dim`
/// of the shape; of columns (all dimensions but the first as one) where dim is kColumns, of the
/// whole tensor where it is kWhole.
struct Maxima {
  static constexpr int kColumns = -1, kWhole = -2;
  int dim = 0;
  std::shared_ptr<Source> most;  // float32
};
/// Decoded values of codes whose scales cover more than a block: an element's scale is the least of
/// the maxima that cover it. Maxima are held in memory while the values are read.
std::shared_ptr<Floats> decoded_given(const Codes& codes, const Shape& shape,
                                      std::vector<Maxima> maxima);
/// Values that are floating-point numbers in the file (float32, bfloat16, float16, float64).
std::shared_ptr<Floats> floats_of(const Leaf& leaf);
/// Encodes row by row: rows = shape[0] (1 for 0-D), cols the rest. `report` receives the errors
/// while the codes are read (may be null; it must stay where it is). Scales that were found while
/// codes were read are kept until they are read, where they are few; else the values are read
/// again: nothing of the tensor's size is held.
Codes encoded(std::shared_ptr<Floats> values, const Shape& shape, const std::string& format,
              int64_t block, StateReport* report);
/// Encodes with the scales of maxima over more than a block, of these dimensions (see Maxima): one
/// pass over the values finds them, when the first of the sources is read. Also gives the maxima.
Codes encoded_given(std::shared_ptr<Floats> values, const Shape& shape, const std::string& format,
                    const std::vector<int>& dims, std::vector<Maxima>& maxima, StateReport* report);
/// Means over the last dimension (`of_rows`), or over the last but one, of values of two dimensions
/// and more.
std::shared_ptr<Floats> means_of(std::shared_ptr<Floats> values, const Shape& shape, bool of_rows);
/// Values that several of a document's sources read, perhaps from several threads.
std::shared_ptr<Floats> locked(std::shared_ptr<Floats> values);
/// Float32 elements of values.
std::shared_ptr<Source> float32_source(std::shared_ptr<Floats> values);
/// The same rounded to bfloat16, to the nearest; `report` as above.
std::shared_ptr<Source> bfloat16_source(std::shared_ptr<Floats> values, StateReport* report);
/// A source of bytes that are held.
std::shared_ptr<Source> constant_source(std::string bytes, int width);

/// What rounding has done to values so far, into a report.
class ErrorSum {
 public:
  explicit ErrorSum(StateReport* report) : report_(report) {}
  bool wanted() const { return report_ != nullptr; }
  void add(const float* before, const float* after, uint64_t count);

 private:
  StateReport* report_;
};

/// Rows and columns of the matrix that a parameter of this shape is coded as.
struct MatrixShape {
  int64_t rows, cols;
};
inline MatrixShape matrix_of(const Shape& shape) {
  if (shape.empty()) return {1, 1};
  int64_t cols = 1;
  for (size_t d = 1; d < shape.size(); ++d) cols *= shape[d];
  return {shape[0], cols};
}

}  // namespace lowbit::ckpt
