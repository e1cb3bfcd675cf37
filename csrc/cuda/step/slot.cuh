// The state of a warp that gets formats at run time: the quantizing and dequantizing kernels of
// cpu/kernels/states.inl.
//
// A warp processes a chunk of up to 256 neighboring values of a row. The float32 values are in
// shared memory, and a lane reads and writes only every 32nd of them. Codes of fewer than 8 bits
// are expanded to bytes and packed again by lanes that process 8 neighbors, so a lane reads and
// writes whole bytes.
//
// A block longer than a chunk is walked twice, first for its largest magnitude, then to write it
// (step.cuh). The shared memory of a warp thus stays at one chunk, 7 KiB, and several blocks of
// threads fit on a multiprocessor. The scale of a block is written with its last chunk, when no
// lane still reads the old one.
#pragma once

#include "cuda/step/batch.cuh"
#include "cuda/step/codes.cuh"

namespace lowbit::cuda {

constexpr int kAnyWarps = 4;
// Resident blocks of threads per multiprocessor. More would fit, but would spill registers.
constexpr int kAnyBlocks = 4;
constexpr int kBlocks = kTile / kMinBlock;  // blocks of a chunk; long blocks of a tile are fewer

/// The index of the scale of (row, col). Block lengths are powers of two.
__device__ __forceinline__ int64_t block_at(const StateSlot& slot, int64_t cols, int64_t row,
                                            int64_t col) {
  const int shift = __ffs(slot.block) - 1;
  return row * ((cols + slot.block - 1) >> shift) + (col >> shift);
}

struct AnyWarp {
  Job job;
  float g[kTile], p[kTile], s[kRuleSlots][kTile];
  alignas(8) uint8_t codes[kTile];  // of fewer than 8 bits, one per byte
  // Of the blocks of a chunk, or of the long blocks of a tile.
  uint32_t absmax[kMaxSlots][kBlocks], absmin[kMaxSlots][kBlocks];
  Random8 random[kTile / 8 + 1];
};
struct AnyShared {
  TablesOf<StateFormats> tables;
  AnyWarp warp[kAnyWarps];
};

/// The position of a chunk. It may begin before the local part, as blocks do: memory has no
/// elements before `from`. The elements [begin, end) are local. The others exist in state only, and
/// are zero.
struct Chunk {
  int64_t row, col;
  int n, from, begin, end;
  __device__ __forceinline__ bool has(int i) const { return i >= begin && i < end; }
};

/// The number of columns of the whole row before the local part if blocks are cut there, else 0.
__device__ __forceinline__ int64_t offset_of(const Job& job) {
  if (job.cut != kCutAll) return 0;
  return job.first - divide(job.first, job.global_cols) * job.global_cols;
}

/// The index, among the scales of a slot, of the first block of a chunk's row, and the offset of
/// the chunk's first block from it.
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

/// Expands n codes from memory to one byte each. Codes before `from`, which is on a byte boundary,
/// become zeros. Bytes after the n codes are arbitrary.
__device__ __forceinline__ void spread(const uint8_t* in, int bits, uint8_t* codes, int n, int from,
                                       int lane) {
  __syncwarp();  // no lane still reads the previous codes
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

/// The inverse. Memory before `from` is unchanged, and bits after the last code are zero.
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

/// The scales of a chunk: those of blocks, in memory, or cross-tile scales, as one magnitude per
/// value.
struct ScalesAt {
  char* stored;
  int shift;  // log2 of the block
  bool measured;
  const uint32_t *row, *cols;  // cross-tile: null if the kind has none

  __device__ __forceinline__ uint32_t absmax(int i) const {
    const uint32_t of_row = row != nullptr ? *row : ~0u;
    if (cols == nullptr) return of_row;
    return cols[i] < of_row ? cols[i] : of_row;
  }
};

__device__ __forceinline__ ScalesAt scales_at(const StateSlot& slot, const Shape& shape,
                                              const Job& job, const Chunk& at, const uint32_t* rows,
                                              const uint32_t* cols) {
  ScalesAt s{};
  s.measured = is_cross_tile(slot.kind);
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

/// The largest and the smallest nonzero magnitude of x[begin, end), computed by all lanes.
struct Extremes {
  uint32_t absmax, absmin;
};
__device__ __forceinline__ Extremes extremes(const float* x, int begin, int end, int lane) {
  // below: distance of the smallest magnitude below the largest integer.
  uint32_t absmax = 0, below = 0;
  for (int i = begin + lane; i < end; i += kLanes) {
    const uint32_t magnitude = magnitude_bits(x[i]);
    absmax = magnitude > absmax ? magnitude : absmax;
    const uint32_t b = ~(magnitude - 1);  // zero becomes the largest magnitude
    below = b > below ? b : below;
  }
  below = largest(below, kLanes);
  return {largest(absmax, kLanes), below == 0 ? kNoMin : ~below + 1};
}

// ---- one slot ----

template <class Code>
__device__ __forceinline__ void dequantize_values(const Code& code, const void* codes,
                                                  const ScalesAt& scales, float* out, int n,
                                                  int from, int lane) {
  const auto* in = static_cast<const typename Code::Storage*>(codes);
  if constexpr (Code::kScaled) {
    using Scale = typename Code::Format::Scale;
    const auto* stored = reinterpret_cast<const typename Scale::Stored*>(scales.stored);
    LB_UNROLL(2)
    for (int i = lane; i < n; i += kLanes) {
      if (i < from) continue;
      const float z = code.dequantize(in[i]);
      if constexpr (!Scale::kNeedsMin) {
        if (scales.measured) {
          out[i] = Scale::of(scales.absmax(i), kNoMin).from_z(z);
          continue;
        }
      }
      out[i] = Scale::read(stored + (i >> scales.shift) * Scale::kStored).from_z(z);
    }
  } else {
    for (int i = lane; i < n; i += kLanes) {
      if (i >= from) out[i] = Device<typename Code::Format>::dequantize(in[i], code.tables);
    }
  }
}

/// The parameters for quantizing the values of a slot.
struct Quantization {
  ScalesAt scales;
  const uint32_t *absmax, *absmin;  // of the chunk's blocks, starting with the first
  int mask;                         // values whose index has none of these bits write the scale
  bool writes;
  const Random8* random;  // null if codes are rounded to nearest
  int skip;               // number of elements of the first group before the chunk
  __device__ __forceinline__ uint32_t bits16(int i) const {
    return random[(skip + i) >> 3].bits16((skip + i) & 7);
  }
};

template <class Code>
__device__ __forceinline__ void quantize_values(const Code& code, const float* x, void* codes,
                                                const Quantization& to, int n, int from, int lane) {
  using Storage = typename Code::Storage;
  auto* out = static_cast<Storage*>(codes);
  if constexpr (Code::kScaled) {
    using Scale = typename Code::Format::Scale;
    Scale scale{};
    LB_UNROLL(1)
    for (int i = lane; i < n; i += kLanes) {
      if (to.scales.measured) {
        if (i < from) continue;
        if constexpr (!Scale::kNeedsMin) scale = Scale::of(to.scales.absmax(i), kNoMin);
      } else if ((i & to.mask) < kLanes) {  // the next block
        const int b = i >> to.scales.shift;
        scale = Scale::of(to.absmax[b], to.absmin[b]);
        if (to.writes && (i & to.mask) == 0)
          scale.write(reinterpret_cast<typename Scale::Stored*>(to.scales.stored) +
                      b * Scale::kStored);
      }
      if (i < from) continue;
      const float z = scale.to_z(x[i]);
      const uint32_t c = to.random != nullptr
                             ? stochastic_code(code, code.is_signed(), scale, x[i], z, to.bits16(i))
                             : code.quantize(z);
      out[i] = static_cast<Storage>(scale.coded ? c : code.zero());
    }
  } else {
    using F = typename Code::Format;
    for (int i = lane; i < n; i += kLanes) {
      if (i < from) continue;
      if constexpr (requires { F::quantize(0.0f, 0u); }) {
        out[i] = to.random != nullptr ? F::quantize(x[i], to.bits16(i)) : F::quantize(x[i]);
      } else {
        out[i] = F::quantize(x[i]);
      }
    }
  }
}

__device__ __forceinline__ uint8_t* codes_at(const StateSlot& slot, const Shape& shape,
                                             int64_t cols, const Chunk& at) {
  // Whole bytes of codes precede a chunk that begins before the local part.
  return static_cast<uint8_t*>(slot.values) + at.row * code_bytes(cols, shape.bits) +
         (at.col * shape.bits >> 3);
}

__device__ __forceinline__ void dequantize_slot(AnyWarp& w, int k, const Chunk& at, int lane,
                                                const TablesOf<StateFormats>& tables) {
  const StateSlot& slot = w.job.state[k];
  const Shape& shape = kShapes.at[slot.format];
  const uint8_t* codes = codes_at(slot, shape, w.job.cols, at);
  if (shape.bits < 8) {
    spread(codes, shape.bits, w.codes, at.n, at.from, lane);
    codes = w.codes;
  }
  const ScalesAt scales = scales_at(slot, shape, w.job, at, slot.row_absmax, slot.col_absmax);
  with_code(slot.format, tables, [&](const auto& code) {
    dequantize_values(code, codes, scales, w.s[k], at.n, at.from, lane);
  });
}

/// Draws the random bits of the chunk's elements for the parameter (slot 0) or the state (from 1),
/// as cpu/tile.cpp does. Returns the number of elements of the first group before the chunk.
__device__ __forceinline__ int draw(AnyWarp& w, const Chunk& at, int slot, int lane) {
  const uint64_t index = static_cast<uint64_t>(w.job.first + at.row * w.job.global_cols + at.col);
  const int skip = static_cast<int>(index & 7);
  const uint64_t first = (index >> 3) | static_cast<uint64_t>(slot) << 56;
  __syncwarp();  // no lane still reads the previous bits
  LB_UNROLL(1)
  for (int i = lane; i < (skip + at.n + 7) / 8; i += kLanes)
    w.random[i] = random8(w.job.random, first + static_cast<uint64_t>(i));
  __syncwarp();
  return skip;
}

__device__ __forceinline__ bool is_long(const StateSlot& slot) { return slot.block > kTile; }

/// Resets the extremes before the first of two walks over a tile.
__device__ __forceinline__ void forget_blocks(AnyWarp& w, int lane) {
  static_assert(kMaxSlots * kBlocks == kLanes);
  __syncwarp();
  w.absmax[lane / kBlocks][lane % kBlocks] = 0;
  w.absmin[lane / kBlocks][lane % kBlocks] = kNoMin;
}

/// Measures the extremes of the chunk's blocks. `first` is the offset of the chunk in the tile.
__device__ __forceinline__ void measure_blocks(AnyWarp& w, int k, const Chunk& at, int first,
                                               int lane) {
  const StateSlot& slot = w.job.state[k];
  __syncwarp();  // memory order: no lane still reads the previous extremes, shuffles follow
  if (is_long(slot)) {
    const Extremes e = extremes(w.s[k], 0, at.n, lane);
    const int b = first / slot.block;
    if (lane == 0) {
      w.absmax[k][b] = e.absmax > w.absmax[k][b] ? e.absmax : w.absmax[k][b];
      w.absmin[k][b] = e.absmin < w.absmin[k][b] ? e.absmin : w.absmin[k][b];
    }
    return;
  }
  LB_UNROLL(1)
  for (int b = 0; b * slot.block < at.n; ++b) {
    const int end = (b + 1) * slot.block;
    const Extremes e = extremes(w.s[k], b * slot.block, end < at.n ? end : at.n, lane);
    if (lane == 0) w.absmax[k][b] = e.absmax, w.absmin[k][b] = e.absmin;
  }
}

/// Loads the extremes of the chunk's blocks in a cut row, which all ranks measured.
__device__ __forceinline__ void take_blocks(AnyWarp& w, int k, const Chunk& at, int64_t cut,
                                            int lane) {
  const StateSlot& slot = w.job.state[k];
  const BlockAt block = block_of(slot, w.job, cut, at.col);
  const uint32_t* given = slot.block_next + 2 * (block.row + block.col);
  __syncwarp();  // no lane still reads the previous extremes
  if (lane * slot.block >= at.n) return;
  const uint32_t rest = given[2 * lane + 1];
  w.absmax[k][lane] = given[2 * lane];
  w.absmin[k][lane] = rest == 0 ? kNoMin : 0x7fffffffu - rest;
}

__device__ __forceinline__ void quantize_slot(AnyWarp& w, int k, const Chunk& at, int first,
                                              int lane, const TablesOf<StateFormats>& tables) {
  const StateSlot& slot = w.job.state[k];
  const Shape& shape = kShapes.at[slot.format];
  Quantization to{};
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
    to.absmax = w.absmax[k] + b, to.absmin = w.absmin[k] + b;
    to.mask = (whole ? kTile : slot.block) - 1;
    const int64_t end = at.col + at.n;
    // For cut rows, cut_scales writes the scales of the whole row.
    to.writes = cut < 0 && (!whole || (end & (slot.block - 1)) == 0 || end == w.job.cols);
  }
  if (slot.stochastic) {
    to.skip = draw(w, at, k + 1, lane);
    to.random = w.random;
  }
  __syncwarp();  // the extremes are written, and no lane still reads scales or codes
  uint8_t* codes = codes_at(slot, shape, w.job.cols, at);
  uint8_t* out = shape.bits < 8 ? w.codes : codes;
  with_code(slot.format, tables,
            [&](const auto& code) { quantize_values(code, w.s[k], out, to, at.n, at.from, lane); });
  if (shape.bits < 8) gather(w.codes, shape.bits, codes, at.n, at.from, lane);
}

}  // namespace lowbit::cuda
