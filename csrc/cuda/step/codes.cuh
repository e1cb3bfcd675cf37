// Codes of any format, for kernels that get the format at run time.
//
// Most formats are codebooks (core/state/codebook.h), which differ only in their tables. They share
// one path that reads the tables of all formats from one array, so a kernel has it once. Each of
// the other formats is a case of its own.
#pragma once

#include "core/scale/block.h"
#include "core/state/chance/stochastic.h"
#include "cuda/format.cuh"
#include "cuda/step/dynamic8.cuh"

namespace lowbit::cuda {

template <class F>
constexpr int book_entries() {
  if constexpr (IsCodebook<F>) {
    return 1 << F::kBits;
  } else {
    return 0;
  }
}
template <class... F>
constexpr int all_entries(Types<F...>) {
  return (book_entries<F>() + ...);
}

/// The values and boundaries of all codebooks, one after another.
struct Books {
  static constexpr int kEntries = all_entries(StateFormats{});
  float value[kEntries], boundary[kEntries];
};

/// The properties of a format that a walk needs before it reads codes.
struct Shape {
  int bits, scale_bytes;
  int entries, offset;  // of a codebook in Books; entries == 0: not a codebook
  int codes;            // number of used codes of a codebook
  uint32_t zero, lowest;
  bool scaled, is_signed, needs_min;
};
struct Shapes {
  Shape at[StateFormats::kCount];
};

template <class F>
constexpr Shape shape_of(int offset) {
  Shape s{};
  s.bits = F::kBits, s.scaled = F::kScaled, s.is_signed = F::kSigned;
  if constexpr (F::kScaled) {
    s.scale_bytes = F::Scale::kStored * static_cast<int>(sizeof(typename F::Scale::Stored));
    s.needs_min = F::Scale::kNeedsMin;
  }
  if constexpr (IsCodebook<F>) {
    static_assert(__is_same(typename F::Scale, BlockScale) && F::kBits <= 8);
    s.entries = book_entries<F>(), s.offset = offset, s.codes = F::kCodes;
    s.zero = F::kZeroCode, s.lowest = F::kLowest;
  }
  return s;
}

template <class... F>
constexpr Shapes make_shapes(Types<F...>) {
  Shapes all{};
  int i = 0, offset = 0;
  ((all.at[i++] = shape_of<F>(offset), offset += book_entries<F>()), ...);
  return all;
}

template <class F>
constexpr void fill_book(Books& books, int& offset) {
  if constexpr (IsCodebook<F>) {
    constexpr CodebookTable<typename F::Map> table;
    for (int i = 0; i < book_entries<F>(); ++i) {
      books.value[offset + i] = table.value[i];
      books.boundary[offset + i] = table.boundary[i];
    }
    offset += book_entries<F>();
  }
}
template <class... F>
constexpr Books make_books(Types<F...>) {
  Books books{};
  int offset = 0;
  (fill_book<F>(books, offset), ...);
  return books;
}

/// The offset of a codebook's tables.
template <class F, class... All>
constexpr int book_offset(Types<All...>) {
  int offset = 0;
  bool found = false;
  ((found = found || __is_same(F, All), offset += found ? 0 : book_entries<All>()), ...);
  return offset;
}

template <class F>
constexpr int kBookOffset = book_offset<F>(StateFormats{});

LB_TABLE Books kBooks = make_books(StateFormats{});
LB_TABLE Shapes kShapes = make_shapes(StateFormats{});

// The argument of with_code's callback: how codes of one format are read and written.

/// One of core's formats, or its faster equivalent.
template <class F>
struct FormatCode {
  using Format = F;
  using Storage = typename F::Storage;
  static constexpr bool kScaled = F::kScaled;
  const typename Device<F>::Tables& tables;

  __device__ __forceinline__ float dequantize(uint32_t code) const {
    return Device<F>::dequantize(static_cast<Storage>(code), tables);
  }
  __device__ __forceinline__ uint32_t quantize(float z) const {
    return Device<F>::quantize(z, tables);
  }
  __device__ __forceinline__ uint32_t neighbour(uint32_t code, bool up) const {
    return F::neighbour(code, up);
  }
  __device__ __forceinline__ uint32_t zero() const { return F::kZeroCode; }
  __device__ __forceinline__ bool is_signed() const { return F::kSigned; }
};

/// Any codebook.
struct BookCode {
  struct Format {
    using Scale = BlockScale;
  };
  using Storage = uint8_t;
  static constexpr bool kScaled = true;
  const float *value, *boundary;
  const Shape& shape;

  __device__ __forceinline__ float dequantize(uint32_t code) const { return value[code]; }
  __device__ __forceinline__ uint32_t quantize(float z) const {
    uint32_t code = 0;
    LB_UNROLL(1)
    for (uint32_t step = static_cast<uint32_t>(shape.entries) / 2; step != 0; step >>= 1)
      code += z >= boundary[code + step] ? step : 0;
    return code;
  }
  __device__ __forceinline__ uint32_t neighbour(uint32_t code, bool up) const {
    if (up) return code + 1 < static_cast<uint32_t>(shape.codes) ? code + 1 : code;
    return code > shape.lowest ? code - 1 : code;
  }
  __device__ __forceinline__ uint32_t zero() const { return shape.zero; }
  __device__ __forceinline__ bool is_signed() const { return shape.is_signed; }
};

/// Calls fn with the Code of a format.
template <class Fn>
__device__ __forceinline__ void with_code(int format, const TablesOf<StateFormats>& tables,
                                          const Fn& fn) {
  const Shape& shape = kShapes.at[format];
  if (shape.entries != 0) {
    fn(BookCode{kBooks.value + shape.offset, kBooks.boundary + shape.offset, shape});
    return;
  }
  visit(format, StateFormats{}, [&](auto f) {
    using F = decltype(f);
    if constexpr (!IsCodebook<F>) fn(FormatCode<F>{tables});
  });
}

}  // namespace lowbit::cuda
