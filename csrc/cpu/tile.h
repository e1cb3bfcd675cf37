// One tile of a job in float32, used by every pass over a job.
#pragma once

#include <cstdint>

#include "core/job.h"
#include "core/update/rule.h"
#include "cpu/kernels.h"

namespace lowbit::cpu {

/// Prefetches `bytes`. The hardware prefetches a stream while it is read, but not while the kernels
/// compute.
inline void prefetch(const void* memory, int64_t bytes) {
  constexpr int kLine = 64;
  for (int64_t at = 0; at < bytes; at += kLine)
    __builtin_prefetch(static_cast<const char*>(memory) + at);
}

/// A cursor over the tiles of one job: loads a tile and tracks the memory of its parts.
class Tile {
 public:
  Tile(const Job& job, const Kernels& kernel);

  /// Loads gradient, parameter, state and factors of the tile at (row, tile of the row). Returns
  /// false, without loading, if none of its elements are local. reads: what is loaded beside the
  /// gradient, a set of Reads.
  bool load(int64_t row, int64_t tile, int reads = kReadsAll);
  /// Updates p and s, and draws the random bits that the parameter needs. State that is not local
  /// is zero.
  void update();
  /// Writes state and parameter.
  void store();

  // The loaded tile: its first column (before the local part if blocks begin there), its length,
  // and the range of its local elements. All other elements are ignored.
  int64_t row, col;
  int n, begin, end;
  bool ragged() const { return begin > 0 || end < n; }
  /// Sets the elements of x that are not local to zero.
  void blank(float* x) const;
  /// The index, within the row, of the tile's first block of a slot.
  int64_t block_of(const StateSlot& slot) const { return (offset_ + col) / slot.block; }
  float* g() { return g_; }
  float* p() { return p_; }
  float* const* s() { return states_; }
  const float* const* f() { return factors_; }
  /// Calls fn(index among inner rows, index among the column sums, first element, count) for each
  /// run of the tile's elements in one inner row.
  template <class Fn>
  void runs(const Fn& fn) const {
    for (int i = begin; i < end;) {
      const int64_t at = col + i, inner = at / job_.inner_cols, c = at - inner * job_.inner_cols;
      const int count =
          end - i < job_.inner_cols - c ? end - i : static_cast<int>(job_.inner_cols - c);
      const int64_t r = row * rows_inside_ + inner;
      const int64_t batch = r / job_.inner_rows;
      fn(r, batch, c, i, count);
      i += count;
    }
  }

 private:
  struct Cursor {
    int bits, stored_bytes;
    // The start of the tile. It lies before the memory if the tile begins before the local part.
    char* values;
    char* scales;
  };
  /// The codes of a tile that begins before the local part, in a buffer.
  const char* codes_in(const Cursor& c);
  void load_factors();
  void codes_out(const Cursor& c) const;
  void absmax_of(const uint32_t* rows, const uint32_t* cols, int stride, uint32_t* out) const;
  const uint16_t* draw_for(int slot);

  const Job& job_;
  const Kernels& kernel_;
  int slots_, factors_count_, param_bytes_, compensation_bytes_, grad_bytes_, skip_ = 0;
  bool random_, finds_absmax_ = false;
  int64_t rows_inside_;  // inner rows in a row of the job
  // Columns before the local part, of the first tile and of the first block.
  int64_t lead_, offset_;
  Cursor cursor_[kMaxSlots];
  char *param_ = nullptr, *compensation_ = nullptr;
  // Arrays are an odd number of cache lines apart: at multiples of 4096 bytes a load waits for the
  // store to another array.
  static constexpr int kRoom = kMaxTile + 272;
  alignas(64) float g_[kRoom], p_[kRoom], s_[kMaxSlots][kRoom];
  float f_[2 * kMaxFactors][kRoom];
  float* states_[kMaxSlots];
  const float* factors_[2 * kMaxFactors];
  uint32_t absmax_[kMaxTile];
  BlockScales scales_[kMaxSlots];
  // The magnitudes that the update finds, valid if the whole tile is local.
  alignas(64) float absmax_of_state_[kMaxSlots * kMaxOfSlot];
  alignas(64) char codes_[kMaxTile * sizeof(float)];
  alignas(64) uint16_t random16_[kMaxTile + 8 + 7 * 8], state_random16_[kMaxTile + 8 + 7 * 8];
};

}  // namespace lowbit::cpu
