// The state formats of lowbit's catalog, as files need them: dtypes, sizes, codebooks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "container/manifest/dtype.h"

namespace lowbit::ckpt {

/// One format of the catalog.
struct FormatInfo {
  std::string name;
  int bits, block;  // block: the default length
  bool scaled, is_signed;
  const Dtype *dtype, *scale_dtype;  // of codes and of scales; scale_dtype is null if not `scaled`
  int scale_numbers;                 // for each block
  bool cross_tile;                   // whether a scale may cover more than a block
};
/// The format of that name; null if the catalog has none.
const FormatInfo* find_format(const std::string& name);

/// The value of each code of a format at a scale of 1.
std::vector<float> codebook_of(const std::string& format);

/// The matrix as which a tensor is quantized: dimension 0 gives the rows, all others the columns.
struct MatrixShape {
  int64_t rows, cols;
};
inline MatrixShape matrix_of(const Shape& shape) {
  if (shape.empty()) return {1, 1};
  int64_t cols = 1;
  for (size_t d = 1; d < shape.size(); ++d) cols *= shape[d];
  return {shape[0], cols};
}

/// The shape of a tensor by the shapes of its means of rows and of columns.
inline Shape shape_of_means(Shape rows, const Shape& cols) {
  rows.push_back(cols.back());
  return rows;
}

}  // namespace lowbit::ckpt
