// How the device reads and writes a state format. By default core's own functions; a format whose
// definition wants tables brings a faster twin with the same bits (dynamic8.cuh), which finds its
// tables in shared memory.
#pragma once

#include "core/registry.h"

// How often a loop's body is repeated in the code.
#ifndef LB_UNROLL
#define LB_PRAGMA(text) _Pragma(#text)
#define LB_UNROLL(times) LB_PRAGMA(unroll times)
#endif

namespace lowbit::cuda {

template <class F>
struct Device {
  struct Tables {};
  /// Called by every thread of a block before the first use of the tables.
  static __device__ __forceinline__ void fill(Tables&, int, int) {}
  static __device__ __forceinline__ float decode(typename F::Storage stored, const Tables&) {
    return F::decode(stored);
  }
  static __device__ __forceinline__ typename F::Storage encode(float z, const Tables&) {
    return static_cast<typename F::Storage>(F::encode(z));
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

/// Calls fn with the type at `index`; nothing where there is none.
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

/// Eight neighbouring values as the memory holds them, moved in pieces of up to 16 bytes.
template <class Storage>
struct Pack8 {
  static constexpr int kBytes = 8 * sizeof(Storage), kWords = kBytes / 4,
                       kPiece = kWords < 4 ? kWords : 4;
  struct alignas(4 * kPiece) Piece {
    uint32_t word[kPiece];
  };
  Piece piece[kWords / kPiece];

  static __device__ __forceinline__ Pack8 load(const void* at) {
    Pack8 pack;
    for (int i = 0; i < kWords / kPiece; ++i) pack.piece[i] = static_cast<const Piece*>(at)[i];
    return pack;
  }
  __device__ __forceinline__ void store(void* at) const {
    for (int i = 0; i < kWords / kPiece; ++i) static_cast<Piece*>(at)[i] = piece[i];
  }
  __device__ __forceinline__ void clear() {
    for (int i = 0; i < kWords; ++i) word(i) = 0;
  }
  __device__ __forceinline__ Storage get(int e) const {
    if constexpr (sizeof(Storage) == 4) {
      return __builtin_bit_cast(Storage, piece[e / kPiece].word[e % kPiece]);
    } else {
      const int w = e * static_cast<int>(sizeof(Storage)) / 4,
                shift = e * static_cast<int>(sizeof(Storage)) % 4 * 8;
      return static_cast<Storage>(piece[w / kPiece].word[w % kPiece] >> shift);
    }
  }
  __device__ __forceinline__ void set(int e, Storage x) {
    if constexpr (sizeof(Storage) == 4) {
      word(e) = __builtin_bit_cast(uint32_t, x);
    } else {
      const int w = e * static_cast<int>(sizeof(Storage)) / 4,
                shift = e * static_cast<int>(sizeof(Storage)) % 4 * 8;
      constexpr uint32_t kOnes = static_cast<Storage>(~Storage{0});
      word(w) = (word(w) & ~(kOnes << shift)) | static_cast<uint32_t>(x) << shift;
    }
  }

 private:
  __device__ __forceinline__ uint32_t& word(int w) { return piece[w / kPiece].word[w % kPiece]; }
};

}  // namespace lowbit::cuda
