// State for a warp that learns formats at run time: the leaves of cpu/leaves.inl that decode and
// encode.
//
// A warp works on a chunk of up to 256 neighbouring values of a row: float32 values wait in shared
// memory, a lane takes every 32nd of them and nobody else's. Codes of fewer than 8 bits are spread
// to bytes and back by lanes that take 8 neighbours, so a lane reads and writes whole bytes.
//
// A block longer than a chunk is walked twice, first for its largest magnitude, then to write it
// (step.cuh): the shared memory of a warp stays that of one chunk, 7 KiB, and a block of threads
// fits several times on a processor. A block's scale is written with its last chunk, when nobody
// reads the old one any more.
#pragma once

#include "cuda/batch.cuh"
#include "cuda/codes.cuh"

namespace lowbit::cuda {

constexpr int kAnyWarps = 4;
// Blocks of threads at once on a processor. More would fit, with registers spilled to memory.
constexpr int kAnyBlocks = 4;
constexpr int kBlocks = kTile / kLeastBlock;  // blocks of a chunk; long ones of a tile are fewer

/// The index of the scale that belongs to (row, col). Block lengths are powers of two.
__device__ __forceinline__ int64_t block_at(const StateSlot& slot, int64_t cols, int64_t row,
                                            int64_t col) {
  const int shift = __ffs(slot.block) - 1;
  return row * ((cols + slot.block - 1) >> shift) + (col >> shift);
}

struct AnyWarp {
  Job job;
  float g[kTile], p[kTile], s[kMostSlots][kTile];
  alignas(8) uint8_t codes[kTile];  // of fewer than 8 bits, one to a byte
  uint32_t most[kMaxSlots][kBlocks],
      least[kMaxSlots][kBlocks];  // of the blocks of a chunk; of the long blocks of a tile
  Random8 random[kTile / 8 + 1];
};
struct AnyShared {
  TablesOf<StateFormats> tables;
  AnyWarp warp[kAnyWarps];
};

/// Where a chunk is. It may begin before the part, as blocks do: the elements before `from` are not
/// even in memory. Of the others [begin, end) are here; the rest lies in state, and is zero.
struct Chunk {
  int64_t row, col;
  int n, from, begin, end;
  __device__ __forceinline__ bool has(int i) const { return i >= begin && i < end; }
};

/// Columns of a row of the whole before the part, where blocks are cut there; else 0.
__device__ __forceinline__ int64_t offset_of(const Job& job) {
  if (job.cut != kCutAll) return 0;
  return job.first - divide(job.first, job.global_cols) * job.global_cols;
}

/// The index among a slot's scales of the first block of a chunk's row, and how far from it the
/// chunk's first block lies.
struct BlockAt {
  int64_t row, col;
};
__device__ __forceinline__ BlockAt block_of(const StateSlot& slot, const Job& job, int64_t row,
                                            int64_t col) {
  const int shift = __ffs(slot.block) - 1;
  const int64_t cols = job.cut == kCutAll ? job.global_cols : job.cols;
  return {row * ((cols + slot.block - 1) >> shift), (offset_of(job) + col) >> shift};
}

// ---- codes of fewer than 8 bits ----

/// n codes from memory to one byte each, those before `from`, at the edge of a byte, as zeros.
/// Behind the n there may be others.
__device__ __forceinline__ void spread(const uint8_t* in, int bits, uint8_t* codes, int n, int from,
                                       int lane) {
  __syncwarp();  // no lane still reads the codes before
  if (lane * 8 < n) {
    const int bytes = static_cast<int>(code_bytes(n, bits)) - lane * bits;
    const int first = from * bits / 8 - lane * bits;
    uint64_t word = 0;
    for (int b = first > 0 ? first : 0; b < bits && b < bytes; ++b)
      word |= static_cast<uint64_t>(in[lane * bits + b]) << (8 * b);
    const uint32_t mask = (1u << bits) - 1;
    uint32_t half[2] = {};
    for (int e = 0; e < 8; ++e)
      half[e / 4] |= (static_cast<uint32_t>(word >> (e * bits)) & mask) << (8 * (e % 4));
    auto* out = reinterpret_cast<uint32_t*>(codes) + 2 * lane;
    out[0] = half[0], out[1] = half[1];
  }
  __syncwarp();
}

/// The inverse: what lies before `from` stays. Bits behind the last code are zero.
__device__ __forceinline__ void gather(const uint8_t* codes, int bits, uint8_t* out, int n,
                                       int from, int lane) {
  __syncwarp();
  if (lane * 8 < n) {
    const auto* in = reinterpret_cast<const uint32_t*>(codes) + 2 * lane;
    const uint32_t half[2] = {in[0], in[1]};
    const int count = n - lane * 8 < 8 ? n - lane * 8 : 8;
    uint64_t word = 0;
    for (int e = 0; e < 8; ++e) {
      const uint64_t code = half[e / 4] >> (8 * (e % 4)) & 255u;
      word |= (e < count ? code : 0) << (e * bits);
    }
    const int bytes = static_cast<int>(code_bytes(count, bits));
    const int first = from * bits / 8 - lane * bits;
    for (int b = first > 0 ? first : 0; b < bytes; ++b)
      out[lane * bits + b] = static_cast<uint8_t>(word >> (8 * b));
  }
}

// ---- scales ----

/// The scales of a chunk: those of blocks in memory, or for each value the magnitude that a
/// measured one comes from.
struct ScalesAt {
  char* stored;
  int shift;  // log2 of the block
  bool measured;
  const uint32_t *row, *cols;  // measured: null where the kind has none

  __device__ __forceinline__ uint32_t most(int i) const {
    const uint32_t of_row = row != nullptr ? *row : ~0u;
    if (cols == nullptr) return of_row;
    return cols[i] < of_row ? cols[i] : of_row;
  }
};

__device__ __forceinline__ ScalesAt scales_at(const StateSlot& slot, const Shape& shape,
                                              const Job& job, const Chunk& at, const uint32_t* rows,
                                              const uint32_t* cols) {
  ScalesAt s{};
  s.measured = is_measured(slot.kind);
  if (s.measured) {
    s.row = rows != nullptr ? rows + at.row * slot.row_stride : nullptr;
    s.cols = cols != nullptr ? cols + at.col : nullptr;
  } else if (slot.kind == kBlock) {
    s.shift = __ffs(slot.block) - 1;
    const BlockAt block = block_of(slot, job, at.row, at.col);
    s.stored = static_cast<char*>(slot.scales) + (block.row + block.col) * shape.scale_bytes;
  }
  return s;
}

/// The largest magnitude of x[begin, end), and the least one that is not zero, by all lanes.
struct Extremes {
  uint32_t most, least;
};
__device__ __forceinline__ Extremes extremes(const float* x, int begin, int end, int lane) {
  uint32_t most = 0, below = 0;  // below: how far the least lies below the largest integer
  for (int i = begin + lane; i < end; i += kLanes) {
    const uint32_t magnitude = magnitude_bits(x[i]);
    most = magnitude > most ? magnitude : most;
    const uint32_t b = ~(magnitude - 1);  // zero becomes the largest magnitude
    below = b > below ? b : below;
  }
  below = largest(below, kLanes);
  return {largest(most, kLanes), below == 0 ? kNoLeast : ~below + 1};
}

// ---- one slot ----

template <class Code>
__device__ __forceinline__ void decode_values(const Code& code, const void* codes,
                                              const ScalesAt& scales, float* out, int n, int from,
                                              int lane) {
  const auto* in = static_cast<const typename Code::Storage*>(codes);
  if constexpr (Code::kScaled) {
    using Scale = typename Code::Format::Scale;
    const auto* stored = reinterpret_cast<const typename Scale::Stored*>(scales.stored);
    LB_UNROLL(2)
    for (int i = lane; i < n; i += kLanes) {
      if (i < from) continue;
      const float z = code.decode(in[i]);
      if constexpr (!Scale::kNeedsLeast) {
        if (scales.measured) {
          out[i] = Scale::of(scales.most(i), kNoLeast).from_z(z);
          continue;
        }
      }
      out[i] = Scale::read(stored + (i >> scales.shift) * Scale::kStored).from_z(z);
    }
  } else {
    for (int i = lane; i < n; i += kLanes) {
      if (i >= from) out[i] = Device<typename Code::Format>::decode(in[i], code.tables);
    }
  }
}

/// How a slot's values become codes.
struct Encoding {
  ScalesAt scales;
  const uint32_t *most, *least;  // of the chunk's blocks, from the first on
  int mask;  // a scale is written with values whose index has none of these bits
  bool writes;
  const Random8* random;  // null where codes are rounded to the nearest
  int skip;               // elements of the first group before the chunk
  __device__ __forceinline__ uint32_t bits16(int i) const {
    return random[(skip + i) >> 3].bits16((skip + i) & 7);
  }
};

template <class Code>
__device__ __forceinline__ void encode_values(const Code& code, const float* x, void* codes,
                                              const Encoding& to, int n, int from, int lane) {
  using Storage = typename Code::Storage;
  auto* out = static_cast<Storage*>(codes);
  if constexpr (Code::kScaled) {
    using Scale = typename Code::Format::Scale;
    Scale scale{};
    LB_UNROLL(1)
    for (int i = lane; i < n; i += kLanes) {
      if (to.scales.measured) {
        if (i < from) continue;
        if constexpr (!Scale::kNeedsLeast) scale = Scale::of(to.scales.most(i), kNoLeast);
      } else if ((i & to.mask) < kLanes) {  // another block
        const int b = i >> to.scales.shift;
        scale = Scale::of(to.most[b], to.least[b]);
        if (to.writes && (i & to.mask) == 0)
          scale.write(reinterpret_cast<typename Scale::Stored*>(to.scales.stored) +
                      b * Scale::kStored);
      }
      if (i < from) continue;
      const float z = scale.to_z(x[i]);
      const uint32_t c = to.random != nullptr
                             ? stochastic_code(code, code.is_signed(), z, to.bits16(i))
                             : code.encode(z);
      out[i] = static_cast<Storage>(scale.coded ? c : code.zero());
    }
  } else {
    using F = typename Code::Format;
    for (int i = lane; i < n; i += kLanes) {
      if (i < from) continue;
      if constexpr (requires { F::encode(0.0f, 0u); }) {
        out[i] = to.random != nullptr ? F::encode(x[i], to.bits16(i)) : F::encode(x[i]);
      } else {
        out[i] = F::encode(x[i]);
      }
    }
  }
}

__device__ __forceinline__ uint8_t* codes_at(const StateSlot& slot, const Shape& shape,
                                             int64_t cols, const Chunk& at) {
  // A chunk that begins before the part does so by whole bytes of codes.
  return static_cast<uint8_t*>(slot.values) + at.row * code_bytes(cols, shape.bits) +
         (at.col * shape.bits >> 3);
}

__device__ __forceinline__ void decode_slot(AnyWarp& w, int k, const Chunk& at, int lane,
                                            const TablesOf<StateFormats>& tables) {
  const StateSlot& slot = w.job.state[k];
  const Shape& shape = kShapes.at[slot.format];
  const uint8_t* codes = codes_at(slot, shape, w.job.cols, at);
  if (shape.bits < 8) {
    spread(codes, shape.bits, w.codes, at.n, at.from, lane);
    codes = w.codes;
  }
  const ScalesAt scales = scales_at(slot, shape, w.job, at, slot.row_most, slot.col_most);
  with_code(slot.format, tables, [&](const auto& code) {
    decode_values(code, codes, scales, w.s[k], at.n, at.from, lane);
  });
}

/// Random bits of the chunk's elements for the parameter (slot 0) or state (from 1), as
/// cpu/tile.cpp draws them; how many elements of the first group lie before the chunk.
__device__ __forceinline__ int draw(AnyWarp& w, const Chunk& at, int slot, int lane) {
  const uint64_t index = static_cast<uint64_t>(w.job.first + at.row * w.job.global_cols + at.col);
  const int skip = static_cast<int>(index & 7);
  const uint64_t first = (index >> 3) | static_cast<uint64_t>(slot) << 56;
  __syncwarp();  // no lane still reads the bits before
  LB_UNROLL(1)
  for (int i = lane; i < (skip + at.n + 7) / 8; i += kLanes)
    w.random[i] = random8(w.job.random, first + static_cast<uint64_t>(i));
  __syncwarp();
  return skip;
}

__device__ __forceinline__ bool is_long(const StateSlot& slot) { return slot.block > kTile; }

/// Before the first of two walks over a tile.
__device__ __forceinline__ void forget_blocks(AnyWarp& w, int lane) {
  static_assert(kMaxSlots * kBlocks == kLanes);
  __syncwarp();
  w.most[lane / kBlocks][lane % kBlocks] = 0;
  w.least[lane / kBlocks][lane % kBlocks] = kNoLeast;
}

/// Extremes of the chunk's blocks; `first`: where in the tile the chunk begins.
__device__ __forceinline__ void measure_blocks(AnyWarp& w, int k, const Chunk& at, int first,
                                               int lane) {
  const StateSlot& slot = w.job.state[k];
  __syncwarp();  // memory order: no lane still reads the extremes before, shuffles follow
  if (is_long(slot)) {
    const Extremes e = extremes(w.s[k], 0, at.n, lane);
    const int b = first / slot.block;
    if (lane == 0) {
      w.most[k][b] = e.most > w.most[k][b] ? e.most : w.most[k][b];
      w.least[k][b] = e.least < w.least[k][b] ? e.least : w.least[k][b];
    }
    return;
  }
  LB_UNROLL(1)
  for (int b = 0; b * slot.block < at.n; ++b) {
    const int end = (b + 1) * slot.block;
    const Extremes e = extremes(w.s[k], b * slot.block, end < at.n ? end : at.n, lane);
    if (lane == 0) w.most[k][b] = e.most, w.least[k][b] = e.least;
  }
}

/// Extremes of the chunk's blocks in a cut row, which all holders measured.
__device__ __forceinline__ void take_blocks(AnyWarp& w, int k, const Chunk& at, int64_t cut,
                                            int lane) {
  const StateSlot& slot = w.job.state[k];
  const BlockAt block = block_of(slot, w.job, cut, at.col);
  const uint32_t* given = slot.block_next + 2 * (block.row + block.col);
  __syncwarp();  // no lane still reads the extremes before
  if (lane * slot.block >= at.n) return;
  const uint32_t rest = given[2 * lane + 1];
  w.most[k][lane] = given[2 * lane];
  w.least[k][lane] = rest == 0 ? kNoLeast : 0x7fffffffu - rest;
}

__device__ __forceinline__ void encode_slot(AnyWarp& w, int k, const Chunk& at, int first, int lane,
                                            const TablesOf<StateFormats>& tables) {
  const StateSlot& slot = w.job.state[k];
  const Shape& shape = kShapes.at[slot.format];
  Encoding to{};
  to.scales = scales_at(slot, shape, w.job, at, slot.row_next, slot.col_next);
  if (slot.kind == kBlock) {
    const bool whole = is_long(slot);
    const int64_t cut = w.job.cut_row(at.row);
    if (cut >= 0) {
      take_blocks(w, k, at, cut, lane);
    } else if (!whole) {
      measure_blocks(w, k, at, first, lane);
    }
    const int b = whole && cut < 0 ? first / slot.block : 0;
    to.most = w.most[k] + b, to.least = w.least[k] + b;
    to.mask = (whole ? kTile : slot.block) - 1;
    const int64_t end = at.col + at.n;
    // Of cut rows cut_scales writes them, of the whole row.
    to.writes = cut < 0 && (!whole || (end & (slot.block - 1)) == 0 || end == w.job.cols);
  }
  if (slot.stochastic) {
    to.skip = draw(w, at, k + 1, lane);
    to.random = w.random;
  }
  __syncwarp();  // extremes are there, and no lane still reads scales or codes
  uint8_t* codes = codes_at(slot, shape, w.job.cols, at);
  uint8_t* out = shape.bits < 8 ? w.codes : codes;
  with_code(slot.format, tables,
            [&](const auto& code) { encode_values(code, w.s[k], out, to, at.n, at.from, lane); });
  if (shape.bits < 8) gather(w.codes, shape.bits, codes, at.n, at.from, lane);
}

}  // namespace lowbit::cuda
