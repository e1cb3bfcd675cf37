// How the device reads and writes a state format: by default with core's own functions. A format
// whose definition needs tables has a faster equivalent with the same bits (dynamic8.cuh), whose
// tables are in shared memory.
#pragma once

#include "core/registry.h"

// How often the body of a loop is repeated in the code.
#ifndef LB_UNROLL
#define LB_PRAGMA(text) _Pragma(#text)
#define LB_UNROLL(times) LB_PRAGMA(unroll times)
#endif

// A function of the device that is called.
#ifndef LB_NOINLINE
#define LB_NOINLINE static __device__ __noinline__
#endif

namespace lowbit::cuda {

template <class F>
struct Device {
  struct Tables {};
  /// Every thread of a block calls this before the first use of the tables.
  static __device__ __forceinline__ void fill(Tables&, int, int) {}
  static __device__ __forceinline__ float dequantize(typename F::Storage stored, const Tables&) {
    return F::dequantize(stored);
  }
  static __device__ __forceinline__ typename F::Storage quantize(float z, const Tables&) {
    return static_cast<typename F::Storage>(F::quantize(z));
  }
};

/// The tables of several formats, for one block of threads.
template <class List>
struct TablesOf;
template <class... F>
struct TablesOf<Types<F...>> : Device<F>::Tables... {};

template <class... F>
__device__ __forceinline__ void fill_tables(TablesOf<StateFormats>& tables, Types<F...>, int thread,
                                            int threads) {
  (Device<F>::fill(tables, thread, threads), ...);
}

/// Calls fn with the type at `index`, or does nothing if there is none.
template <class Fn, class... F>
__device__ __forceinline__ void visit(int index, Types<F...>, const Fn& fn) {
  int i = 0;
  ((i++ == index ? fn(F{}) : void()), ...);
}

template <class... F>
constexpr int bytes_at(int index, Types<F...>) {
  const int bytes[] = {static_cast<int>(sizeof(typename F::Storage))...};
  return bytes[index];
}

/// The unit of one memory instruction. The compiler would split a struct of our own into words, and
/// also a plain store of a value assembled from halves. It does not split __stcg, and it knows that
/// __ldcg reads global memory.
template <int kWords>
struct Moved;
template <>
struct Moved<1> {
  using Type = uint32_t;
  static __device__ __forceinline__ Type of(const uint32_t* word) { return *word; }
  static __device__ __forceinline__ void to(Type from, uint32_t* word) { *word = from; }
};
template <>
struct Moved<2> {
  using Type = uint2;
  static __device__ __forceinline__ Type of(const uint32_t* word) {
    return make_uint2(word[0], word[1]);
  }
  static __device__ __forceinline__ void to(Type from, uint32_t* word) {
    word[0] = from.x, word[1] = from.y;
  }
};
template <>
struct Moved<4> {
  using Type = uint4;
  static __device__ __forceinline__ Type of(const uint32_t* word) {
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
  static __device__ __forceinline__ void to(Type from, uint32_t* word) {
    word[0] = from.x, word[1] = from.y, word[2] = from.z, word[3] = from.w;
  }
};

/// Eight neighboring values of `kBits` bits in their memory layout, moved in units of up to 16
/// bytes.
template <class Storage, int kBits = 8 * static_cast<int>(sizeof(Storage))>
struct Pack8 {
  static constexpr int kWords = kBits / 4, kPiece = kWords < 4 ? kWords : 4;
  using Piece = Moved<kPiece>;
  uint32_t word[kWords];

  static __device__ __forceinline__ Pack8 load(const void* at) {
    Pack8 pack;
    for (int i = 0; i < kWords / kPiece; ++i)
      Piece::to(__ldcg(static_cast<const typename Piece::Type*>(at) + i), pack.word + i * kPiece);
    return pack;
  }
  __device__ __forceinline__ void store(void* at) const {
    for (int i = 0; i < kWords / kPiece; ++i)
      __stcg(static_cast<typename Piece::Type*>(at) + i, Piece::of(word + i * kPiece));
  }
  __device__ __forceinline__ void clear() {
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }
  __device__ __forceinline__ Storage get(int e) const {
    if constexpr (kBits == 32) {
      return __builtin_bit_cast(Storage, word[e]);
    } else {
      return static_cast<Storage>(word[e * kBits / 32] >> (e * kBits % 32) & kMask);
    }
  }
  __device__ __forceinline__ void set(int e, Storage x) {
    if constexpr (kBits == 32) {
      word[e] = __builtin_bit_cast(uint32_t, x);
    } else {
      const int w = e * kBits / 32, shift = e * kBits % 32;
      word[w] = (word[w] & ~(kMask << shift)) | (static_cast<uint32_t>(x) & kMask) << shift;
    }
  }

 private:
  static constexpr uint32_t kMask = kBits == 32 ? ~0u : (1u << (kBits % 32)) - 1;
};

template <class P>
constexpr bool kHasCompensation = !__is_same(typename P::Compensation, None);

/// The compensation of 8 values of a parameter.
template <class P>
struct CompensationPack : Pack8<typename P::Compensation> {
  __device__ __forceinline__ void read(const void* at) {
    Pack8<typename P::Compensation>::operator=(Pack8<typename P::Compensation>::load(at));
  }
};
template <class P>
  requires(!kHasCompensation<P>)
struct CompensationPack<P> {
  __device__ __forceinline__ void clear() {}
};

}  // namespace lowbit::cuda
