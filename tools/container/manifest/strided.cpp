#include "container/manifest/strided.h"

#include <cstring>

namespace lowbit::ckpt {
namespace {

/// Copies elements of W bytes from one strided array to another, `steps` outermost first.
template <size_t W>
void copy(const char* from, char* to, const Step* steps, size_t n) {
  if (n == 0) {
    std::memcpy(to, from, W);
    return;
  }
  const Step s = steps[0];
  if (n == 1 && s.from == 1 && s.to == 1) {
    std::memcpy(to, from, s.count * W);
  } else if (n == 1) {
    for (uint64_t i = 0; i < s.count; ++i) std::memcpy(to + i * s.to * W, from + i * s.from * W, W);
  } else {
    for (uint64_t i = 0; i < s.count; ++i)
      copy<W>(from + i * s.from * W, to + i * s.to * W, steps + 1, n - 1);
  }
}

}  // namespace

void copy_strided(const char* from, char* to, const std::vector<Step>& steps, uint64_t width) {
  switch (width) {
    case 1:
      return copy<1>(from, to, steps.data(), steps.size());
    case 2:
      return copy<2>(from, to, steps.data(), steps.size());
    case 4:
      return copy<4>(from, to, steps.data(), steps.size());
    case 8:
      return copy<8>(from, to, steps.data(), steps.size());
    default:
      return copy<16>(from, to, steps.data(), steps.size());
  }
}

std::vector<Step> joined(const std::vector<Step>& steps) {
  std::vector<Step> out;
  for (const Step& s : steps) {
    if (s.count == 1) continue;
    if (!out.empty() && out.back().from == s.from * s.count && out.back().to == s.to * s.count) {
      out.back() = {out.back().count * s.count, s.from, s.to};
    } else {
      out.push_back(s);
    }
  }
  return out;
}

Box common_box(const Box& a, const Box& b) {
  Box out = a;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    const int64_t low = std::max(a.offset[d], b.offset[d]);
    const int64_t high = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    out.offset[d] = low;
    out.shape[d] = std::max<int64_t>(0, high - low);
  }
  return out;
}

void copy_box(const char* from, const Box& held, const Box& wanted, char* to, uint64_t width) {
  if (volume(wanted.shape) == 0) return;
  const Shape outer = row_major(held.shape), inner = row_major(wanted.shape);
  std::vector<Step> steps;
  uint64_t first = 0;
  for (size_t d = 0; d < held.shape.size(); ++d) {
    const auto stride = static_cast<uint64_t>(outer[d]);
    first += static_cast<uint64_t>(wanted.offset[d] - held.offset[d]) * stride;
    steps.push_back(
        {static_cast<uint64_t>(wanted.shape[d]), stride, static_cast<uint64_t>(inner[d])});
  }
  copy_strided(from + first * width, to, joined(steps), width);
}

}  // namespace lowbit::ckpt
