// One tile of a job in float32, as every pass over a job meets it.
#pragma once

#include <cstdint>

#include "cpu/leaves.h"
#include "job.h"

namespace lowbit::cpu {

/// The processor fetches a stream ahead while it is read, and not while a tile is worked on.
inline void prefetch(const void* memory, int64_t bytes) {
  constexpr int kLine = 64;
  for (int64_t at = 0; at < bytes; at += kLine)
    __builtin_prefetch(static_cast<const char*>(memory) + at);
}

/// Walks over the tiles of one job: loads a tile, and knows where its parts lie in memory.
class Tile {
 public:
  Tile(const Job& job, const Leaves& leaf);

  /// Loads gradient, parameter, state and factors of the tile at (row, tile of the row); false, and
  /// nothing is loaded, where no element of it is here.
  bool load(int64_t row, int64_t tile);
  /// Updates p and s; draws the parameter's random bits on the way where they are wanted. State that
  /// is not here is zero.
  void update();
  /// Writes state and parameter.
  void store();

  // Of the tile that is loaded: its first column, which lies before the part where blocks do; its
  // length, and which of its elements are here. What the others hold counts for nothing.
  int64_t row, col;
  int n, begin, end;
  bool ragged() const { return begin > 0 || end < n; }
  /// Sets the elements of x that are not here to zero.
  void blank(float* x) const;
  /// The tile's first block of a slot among those of its row.
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
    char* values;  // where the tile begins; before the memory, but for tiles that begin there
    char* scales;
  };
  /// Codes of a tile that begins before the part, in a buffer.
  const char* codes_in(const Cursor& c);
  void codes_out(const Cursor& c) const;
  void most_of(const uint32_t* rows, const uint32_t* cols, int stride, uint32_t* out) const;
  const uint16_t* draw_for(int slot);

  const Job& job_;
  const Leaves& leaf_;
  int slots_, factors_count_, param_bytes_, extra_bytes_, grad_bytes_, skip_ = 0;
  bool random_, finds_most_ = false;
  int64_t rows_inside_;    // inner rows in a row of the job
  int64_t lead_, offset_;  // columns before the part of the first tile, and of the first block
  Cursor cursor_[kMaxSlots];
  char *param_ = nullptr, *extra_ = nullptr;
  // Apart by an odd number of cache lines: at multiples of 4096 bytes a load waits for the store of
  // another array.
  static constexpr int kRoom = kMostTile + 272;
  alignas(64) float g_[kRoom], p_[kRoom], s_[kMaxSlots][kRoom];
  float f_[2 * kMaxFactors][kRoom];
  float* states_[kMaxSlots];
  const float* factors_[2 * kMaxFactors];
  uint32_t most_[kMostTile];
  BlockScales scales_[kMaxSlots];
  // What the update finds, of use where the whole tile is here.
  alignas(64) float most_of_state_[kMaxSlots * kMostOfSlot];
  alignas(64) char codes_[kMostTile * sizeof(float)];
  alignas(64) uint16_t random16_[kMostTile + 8 + 7 * 8], state_random16_[kMostTile + 8 + 7 * 8];
};

}  // namespace lowbit::cpu
