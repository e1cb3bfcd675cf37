#include "container/manifest/ranges.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

/// Of dimensions `d` and higher; `at` has the first corner of those before.
void add(const Shape& shape, size_t d, Shape at, uint64_t begin, uint64_t end,
         std::vector<Box>& out) {
  if (begin >= end) return;
  Box box{at, Shape(shape.size(), 1)};
  box.offset.resize(shape.size(), 0);
  if (d == shape.size()) {
    out.push_back(std::move(box));
    return;
  }
  const uint64_t row =
      volume(Shape(shape.begin() + static_cast<std::ptrdiff_t>(d) + 1, shape.end()));
  const auto part_of_row = [&](uint64_t number, uint64_t from, uint64_t to) {
    Shape inner = at;
    inner.push_back(static_cast<int64_t>(number));
    add(shape, d + 1, std::move(inner), from, to, out);
  };
  const uint64_t first = (begin + row - 1) / row, last = end / row;  // whole rows
  if (first > last) return part_of_row(last, begin - last * row, end - last * row);
  if (begin < first * row) part_of_row(first - 1, begin - (first - 1) * row, row);
  if (first < last) {
    std::copy(shape.begin() + static_cast<std::ptrdiff_t>(d), shape.end(),
              box.shape.begin() + static_cast<std::ptrdiff_t>(d));
    box.offset[d] = static_cast<int64_t>(first);
    box.shape[d] = static_cast<int64_t>(last - first);
    out.push_back(std::move(box));
  }
  if (last * row < end) part_of_row(last, 0, end - last * row);
}

}  // namespace

std::vector<Box> boxes_of_range(const Shape& shape, uint64_t begin, uint64_t end) {
  std::vector<Box> out;
  if (volume(shape) == 0) return out;  // no range of it has elements
  add(shape, 0, {}, begin, end, out);
  return out;
}

}  // namespace lowbit::ckpt
