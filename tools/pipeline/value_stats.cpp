#include "pipeline/value_stats.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

namespace lowbit::ckpt {
namespace {

/// A floating-point dtype by its bits: magnitudes from `infinity` on are not finite, those above
/// it are NaN.
struct Layout {
  std::string_view dtype;
  uint64_t sign, infinity;
  bool has_infinity = true;
  bool has_negative_zero = true;  // else its bits are the only NaN
};
constexpr Layout kLayouts[] = {
    {"float32", 1ull << 31, 0x7f800000},
    {"float64", 1ull << 63, 0x7ff0000000000000},
    {"float16", 1ull << 15, 0x7c00},
    {"bfloat16", 1ull << 15, 0x7f80},
    {"float8_e5m2", 1ull << 7, 0x7c},
    {"float8_e4m3fn", 1ull << 7, 0x7e, false},  // 0x7f is NaN, 0x7e the largest number
    {"float8_e4m3fnuz", 1ull << 7, 0x7f, false, false},
    {"float8_e5m2fnuz", 1ull << 7, 0x7f, false, false},
    {"float8_e8m0fnu", 0, 0xfe, false},  // exponents; 0xff is NaN
};
/// Pairs of numbers.
constexpr std::pair<std::string_view, std::string_view> kComplex[] = {
    {"complex32", "float16"}, {"complex64", "float32"}, {"complex128", "float64"}};

const Layout* find(std::string_view dtype) {
  for (const Layout& l : kLayouts) {
    if (l.dtype == dtype) return &l;
  }
  return nullptr;
}

const Layout* half_of(std::string_view dtype) {
  for (const auto& [pair, half] : kComplex) {
    if (pair == dtype) return find(half);
  }
  return nullptr;
}

template <class T>
void take(const Layout& layout, const char* values, uint64_t first, uint64_t count, ValueStats& c) {
  const T sign = static_cast<T>(layout.sign), infinity = static_cast<T>(layout.infinity);
  const bool has_infinity = layout.has_infinity;
  const auto magnitude_of = [&](T bits) {
    if (!layout.has_negative_zero && bits == sign) return static_cast<T>(-1);
    return static_cast<T>(bits & ~sign);
  };
  constexpr uint64_t kRun = 4096;  // first a pass that only asks whether there is anything
  for (uint64_t at = 0; at < count; at += kRun) {
    const uint64_t n = std::min(kRun, count - at);
    const char* from = values + at * sizeof(T);
    T limit = 0, negative = 0;
    for (uint64_t i = 0; i < n; ++i) {
      T bits;
      std::memcpy(&bits, from + i * sizeof(T), sizeof(T));
      const T magnitude = magnitude_of(bits);
      limit = std::max(limit, magnitude);
      negative = static_cast<T>(negative | (magnitude != 0 ? bits & sign : 0));
    }
    if (limit < infinity + !has_infinity && negative == 0) continue;
    for (uint64_t i = 0; i < n; ++i) {
      T bits;
      std::memcpy(&bits, from + i * sizeof(T), sizeof(T));
      const T magnitude = magnitude_of(bits);
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

void take(const Layout& layout, int bytes, const char* values, uint64_t first, uint64_t count,
          ValueStats& c) {
  switch (bytes) {
    case 1:
      return take<uint8_t>(layout, values, first, count, c);
    case 2:
      return take<uint16_t>(layout, values, first, count, c);
    case 4:
      return take<uint32_t>(layout, values, first, count, c);
    default:
      return take<uint64_t>(layout, values, first, count, c);
  }
}

}  // namespace

bool has_floats(const Dtype& dtype) {
  return find(dtype.name) != nullptr || half_of(dtype.name) != nullptr;
}

void take(const Dtype& dtype, const void* values, uint64_t first, uint64_t count,
          ValueStats& value_stats) {
  const Layout* layout = find(dtype.name);
  const char* from = static_cast<const char*>(values);
  if (dtype.name == std::string_view("bool")) {
    for (uint64_t i = 0; i < count; ++i) value_stats.odd += static_cast<unsigned char>(from[i]) > 1;
  }
  if (const Layout* half = half_of(dtype.name)) {
    const auto width = static_cast<uint64_t>(dtype.bytes);
    ValueStats parts;
    take(*half, dtype.bytes / 2, from, 0, 2 * count, parts);
    value_stats.count += count;
    for (uint64_t i = 0; parts.nan + parts.infinite > 0 && i < count; ++i) {
      ValueStats one;
      take(*half, dtype.bytes / 2, from + i * width, 0, 2, one);
      value_stats.nan += one.nan > 0;
      value_stats.infinite += one.nan == 0 && one.infinite > 0;
      if (one.nan + one.infinite > 0) value_stats.first = std::min(value_stats.first, first + i);
    }
    return;
  }
  if (layout != nullptr) take(*layout, dtype.bytes, from, first, count, value_stats);
}

}  // namespace lowbit::ckpt
