// Products of bfloat16 matrices in which every output is one float32 chain
// (core/muon/newton_schulz.h). A block of threads computes a tile of 64 x 64 outputs, each thread 8
// x 4 of them, in passes of kDeep terms that lie in shared memory as float32.
#pragma once

#include "core/muon/newton_schulz.h"
#include "cuda/warp.cuh"

namespace lowbit::cuda {

constexpr int kMuonSide = 64, kMuonDeep = 16, kMuonThreads = 128;
constexpr int kMuonTall = 8, kMuonWide = 4;  // outputs of a thread
static_assert(kMuonThreads * kMuonTall * kMuonWide == kMuonSide * kMuonSide);
static_assert(kMuonThreads * 8 ==
              kMuonSide * kMuonDeep);  // each thread loads 8 values of each factor

/// A factor with one index and one term for each value: across, if those with neighboring indices
/// are neighbors in memory, else those with neighboring terms are. Lines begin `stride` values
/// apart.
struct MuonFactor {
  const uint16_t* at;
  int64_t stride, size;  // size: of one matrix of a batch
  bool by_eights;        // lines are multiples of 8 values, aligned for accesses of 16 bytes
};

/// Products of `count` matrices: out[i][j] = alpha chain + beta self[i][j].
struct MuonProduct {
  int64_t count, rows, cols, depth;
  MuonFactor a, b;       // a(i, k), b(j, k)
  bool symmetric;        // out(i, j) = out(j, i): only tiles up to the diagonal are computed
  const uint16_t* self;  // as out, or null if beta is 0
  float alpha, beta;
  uint16_t* out;
  float* sums;  // if not null, takes the chains themselves, and `out` nothing

  LB_HD int64_t down() const { return ceil_div(rows, kMuonSide); }
  LB_HD int64_t across() const { return ceil_div(cols, kMuonSide); }
  /// Of one matrix.
  LB_HD int64_t tiles() const { return symmetric ? down() * (down() + 1) / 2 : down() * across(); }
};

/// The first output of a tile.
struct MuonTile {
  int64_t matrix, row, col;
};
__device__ __forceinline__ MuonTile muon_tile(const MuonProduct& p, int64_t number) {
  const int64_t matrix = divide(number, p.tiles()), tile = number - matrix * p.tiles();
  int64_t row = 0, col = 0;
  if (p.symmetric) {  // tile = row (row + 1) / 2 + col, col <= row; the root may err by one
    row =
        static_cast<int64_t>((__builtin_sqrtf(8.0f * static_cast<float>(tile) + 1.0f) - 1.0f) / 2);
    while (row * (row + 1) / 2 > tile) --row;
    while ((row + 1) * (row + 2) / 2 <= tile) ++row;
    col = tile - row * (row + 1) / 2;
  } else {
    row = divide(tile, p.across()), col = tile - row * p.across();
  }
  return {matrix, row * kMuonSide, col * kMuonSide};
}

/// sum + x y. The product of two bfloat16 numbers is exact, so fusing rounds as often as the CPU
/// does.
__device__ __forceinline__ float exact_product_sum(float x, float y, float sum) {
#if defined(__CUDA_ARCH__)
  return fmaf(x, y, sum);
#else
  return x * y + sum;
#endif
}

constexpr int kMuonPitch = kMuonSide + 4;  // rows are aligned for 16 bytes
struct alignas(16) MuonShared {
  float a[2][kMuonDeep][kMuonPitch], b[2][kMuonDeep][kMuonPitch];
};

/// What a thread loads of a factor: 8 neighboring values of each pass. Values out of range are 0:
/// behind the last term they change no chain, which begins with +0 and therefore is never -0.
template <bool kAcross>
struct MuonLoad {
  MuonFactor from;
  int64_t first, indices, depth;  // of the tile; of the whole factor
  int index, term;                // of the first of the 8

  __device__ __forceinline__ MuonLoad(const MuonFactor& factor, int64_t matrix, int64_t first,
                                      int64_t indices, int64_t depth, int thread)
      : from(factor),
        first(first),
        indices(indices),
        depth(depth),
        index(kAcross ? thread % 8 * 8 : thread % kMuonSide),
        term(kAcross ? thread / 8 : thread / kMuonSide * 8) {
    from.at += matrix * factor.size;
  }

  __device__ __forceinline__ Pack8<uint16_t> fetch(int64_t pass) const {
    const int64_t i = first + index, k = pass + term;
    const int64_t line = kAcross ? k : i, lines = kAcross ? depth : indices;
    const int64_t along = kAcross ? i : k, length = kAcross ? indices : depth;
    Pack8<uint16_t> pack;
    pack.clear();
    if (line >= lines || along >= length) return pack;
    const uint16_t* const at = from.at + line * from.stride + along;
    if (from.by_eights) return Pack8<uint16_t>::load(at);
    LB_UNROLL(8)
    for (int e = 0; e < 8; ++e) {
      if (along + e < length) pack.set(e, at[e]);
    }
    return pack;
  }

  __device__ __forceinline__ void store(const Pack8<uint16_t>& pack,
                                        float (&to)[kMuonDeep][kMuonPitch]) const {
    LB_UNROLL(8)
    for (int e = 0; e < 8; ++e)
      to[term + (kAcross ? 0 : e)][index + (kAcross ? e : 0)] = bfloat16_to_float(pack.get(e));
  }
};

/// Continues the chains of a thread by the terms of a pass.
__device__ __forceinline__ void add_terms(const float (&a)[kMuonDeep][kMuonPitch],
                                          const float (&b)[kMuonDeep][kMuonPitch], int row, int col,
                                          float (&sum)[kMuonTall][kMuonWide]) {
  LB_UNROLL(16)
  for (int k = 0; k < kMuonDeep; ++k) {
    float x[kMuonTall], y[kMuonWide];
    LB_UNROLL(8)
    for (int r = 0; r < kMuonTall; ++r) x[r] = a[k][row + r];
    LB_UNROLL(4)
    for (int q = 0; q < kMuonWide; ++q) y[q] = b[k][col + q];
    LB_UNROLL(8)
    for (int r = 0; r < kMuonTall; ++r) {
      LB_UNROLL(4)
      for (int q = 0; q < kMuonWide; ++q) sum[r][q] = exact_product_sum(x[r], y[q], sum[r][q]);
    }
  }
}

/// Writes an output from its chain.
__device__ __forceinline__ void put_output(const MuonProduct& p, int64_t from, int64_t i, int64_t j,
                                           float sum, bool mirrored) {
  const int64_t at = from + i * p.cols + j;
  if (p.sums != nullptr) {
    p.sums[at] = sum;
    return;
  }
  const uint16_t value = p.self != nullptr ? product_value(sum, p.self[at], p.alpha, p.beta)
                                           : orthogonal_value(p.alpha * sum);
  p.out[at] = value;
  if (mirrored) p.out[from + j * p.cols + i] = value;
}

/// One block of threads for each tile.
template <bool kAcrossA, bool kAcrossB>
__global__ void __launch_bounds__(kMuonThreads, 4) muon_product(LB_ARGUMENT(MuonProduct) p) {
  LB_SHARED(MuonShared, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const MuonTile tile = muon_tile(p, blockIdx.x);
  const MuonLoad<kAcrossA> left(p.a, tile.matrix, tile.row, p.rows, p.depth, thread);
  const MuonLoad<kAcrossB> right(p.b, tile.matrix, tile.col, p.cols, p.depth, thread);
  const int row = thread / (kMuonSide / kMuonWide) * kMuonTall;
  const int col = thread % (kMuonSide / kMuonWide) * kMuonWide;
  float sum[kMuonTall][kMuonWide] = {};
  left.store(left.fetch(0), shared.a[0]);
  right.store(right.fetch(0), shared.b[0]);
  int now = 0;
  LB_UNROLL(1)
  for (int64_t pass = 0; pass < p.depth; pass += kMuonDeep, now ^= 1) {
    __syncthreads();  // this pass is there, and nobody still reads the one before
    const bool more = pass + kMuonDeep < p.depth;
    Pack8<uint16_t> next_a, next_b;
    if (more) next_a = left.fetch(pass + kMuonDeep), next_b = right.fetch(pass + kMuonDeep);
    add_terms(shared.a[now], shared.b[now], row, col, sum);
    if (!more) break;
    left.store(next_a, shared.a[now ^ 1]);
    right.store(next_b, shared.b[now ^ 1]);
  }
  const int64_t from = tile.matrix * p.rows * p.cols;
  const bool mirrored = p.symmetric && tile.row != tile.col;
  LB_UNROLL(8)
  for (int r = 0; r < kMuonTall; ++r) {
    LB_UNROLL(4)
    for (int q = 0; q < kMuonWide; ++q) {
      const int64_t i = tile.row + row + r, j = tile.col + col + q;
      if (i < p.rows && j < p.cols) put_output(p, from, i, j, sum[r][q], mirrored);
    }
  }
}

}  // namespace lowbit::cuda
