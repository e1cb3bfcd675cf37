#include "pipeline/value_stats.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace lowbit::ckpt {
namespace {

/// A floating-point dtype by its bits: magnitudes from `infinity` on are not finite, those above
/// it are NaN.
struct Layout {
  std::string_view dtype;
  uint64_t sign, infinity;
};
constexpr Layout kLayouts[] = {
    {"float32", 1ull << 31, 0x7f800000},
    {"float64", 1ull << 63, 0x7ff0000000000000},
    {"float16", 1ull << 15, 0x7c00},
    {"bfloat16", 1ull << 15, 0x7f80},
    {"float8_e5m2", 1ull << 7, 0x7c},
    {"float8_e4m3fn", 1ull << 7, 0x7e},  // has no infinity: 0x7f is NaN, 0x7e the largest number
};

const Layout* find(const Dtype& dtype) {
  for (const Layout& l : kLayouts) {
    if (l.dtype == dtype.name) return &l;
  }
  return nullptr;
}

template <class T>
void take(const Layout& layout, const char* values, uint64_t first, uint64_t count, ValueStats& c) {
  const T sign = static_cast<T>(layout.sign), infinity = static_cast<T>(layout.infinity);
  const bool has_infinity = layout.dtype != "float8_e4m3fn";
  constexpr uint64_t kRun = 4096;  // first a pass that only asks whether there is anything
  for (uint64_t at = 0; at < count; at += kRun) {
    const uint64_t n = std::min(kRun, count - at);
    const char* from = values + at * sizeof(T);
    T limit = 0, negative = 0;
    for (uint64_t i = 0; i < n; ++i) {
      T bits;
      std::memcpy(&bits, from + i * sizeof(T), sizeof(T));
      const T magnitude = static_cast<T>(bits & ~sign);
      limit = std::max(limit, magnitude);
      negative = static_cast<T>(negative | (magnitude != 0 ? bits & sign : 0));
    }
    if (limit < infinity + !has_infinity && negative == 0) continue;
    for (uint64_t i = 0; i < n; ++i) {
      T bits;
      std::memcpy(&bits, from + i * sizeof(T), sizeof(T));
      const T magnitude = static_cast<T>(bits & ~sign);
      const bool nan = magnitude > infinity, infinite = has_infinity && magnitude == infinity;
      c.nan += nan;
      c.infinite += infinite;
      if (nan || infinite) c.first = std::min(c.first, first + at + i);
      if (!nan && magnitude != 0 && (bits & sign) != 0) {
        ++c.negative;
        c.first_negative = std::min(c.first_negative, first + at + i);
      }
    }
  }
  c.count += count;
}

}  // namespace

bool has_floats(const Dtype& dtype) { return find(dtype) != nullptr; }

void take(const Dtype& dtype, const void* values, uint64_t first, uint64_t count,
          ValueStats& value_stats) {
  const Layout* layout = find(dtype);
  const char* from = static_cast<const char*>(values);
  if (dtype.name == std::string_view("bool")) {
    for (uint64_t i = 0; i < count; ++i) value_stats.odd += static_cast<unsigned char>(from[i]) > 1;
  }
  if (layout == nullptr) return;
  switch (dtype.bytes) {
    case 1:
      return take<uint8_t>(*layout, from, first, count, value_stats);
    case 2:
      return take<uint16_t>(*layout, from, first, count, value_stats);
    case 4:
      return take<uint32_t>(*layout, from, first, count, value_stats);
    default:
      return take<uint64_t>(*layout, from, first, count, value_stats);
  }
}

}  // namespace lowbit::ckpt
