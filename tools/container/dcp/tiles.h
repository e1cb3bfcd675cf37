// Digests of the parts of a chunk, so that what is read of it can be verified without the rest.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "container/manifest/box.h"
#include "io/hash.h"

namespace lowbit::ckpt {

/// A grid over a chunk that is seen as a matrix: its first dimension by all others. Each cell has
/// `cell_rows` rows of `cell_cols` elements, but for the last ones.
struct TileGrid {
  uint64_t rows = 1, cols = 1;  // of the chunk, in elements
  uint64_t down = 1, across = 1;

  uint64_t cell_rows() const { return std::max<uint64_t>(1, (rows + down - 1) / down); }
  uint64_t cell_cols() const { return std::max<uint64_t>(1, (cols + across - 1) / across); }
};

/// The grid of a chunk of this shape: cut as ranks cut it that are 2 or 4 times as many, along rows
/// or columns, and again where a row of cells would have many MiB. One cell where the chunk is
/// small.
TileGrid tile_grid(const Shape& shape, uint64_t width);

/// A rectangle of a grid's matrix, in elements.
struct TileRange {
  uint64_t first_row, rows, first_col, cols;
};
/// The smallest rectangle that has a box of the chunk.
TileRange tile_range(const TileGrid& grid, const Shape& shape, const Box& box);
/// The rectangle of all cells that share an element with `range`.
TileRange whole_tiles(const TileGrid& grid, const TileRange& range);

/// A cell's digest: the first 16 hex digits of XXH3-128 of its elements, row by row.
inline constexpr size_t kTileDigits = 16;

/// The digests of all cells, row by row, from elements that arrive in row-major order.
class TileHasher {
 public:
  TileHasher(const TileGrid& grid, uint64_t width);
  void add(const char* data, uint64_t bytes);
  /// kTileDigits hex digits for each cell.
  const std::string& digits() const { return digits_; }

 private:
  void end_row();
  TileGrid grid_;
  uint64_t row_bytes_, cell_bytes_;
  uint64_t row_ = 0, at_ = 0;  // the next byte
  std::vector<Hash> open_;     // of this row of cells
  std::string digits_;
};

/// What lowbit.json says of a chunk.
struct ChunkDigest {
  std::string whole;  // XXH3-128 of its elements in row-major order
  TileGrid grid = {};
  std::string tiles = {};  // digits of the grid's cells; empty where it has one cell
};

/// Both digests of a chunk of this shape, from elements that arrive in row-major order.
class ChunkHasher {
 public:
  ChunkHasher(const Shape& shape, uint64_t width) : grid_(tile_grid(shape, width)) {
    if (grid_.down * grid_.across > 1) tiles_.emplace(grid_, width);
  }
  void add(const char* data, uint64_t bytes) {
    whole_.add(data, bytes);
    if (tiles_) tiles_->add(data, bytes);
  }
  ChunkDigest digest() const { return {whole_.hex(), grid_, tiles_ ? tiles_->digits() : ""}; }

 private:
  TileGrid grid_;
  Hash whole_;
  std::optional<TileHasher> tiles_;
};

/// The digests of a row of cells, or of a part of one, from rows that arrive from top to bottom.
class CellHashes {
 public:
  /// `band`: whole cells, all of one row of the grid.
  CellHashes(const TileGrid& grid, const TileRange& band, uint64_t width);
  /// Rows of the band, row-major.
  void add(const char* data, uint64_t rows);
  /// After the last row: whether the cells have the digests that `digits` lists for the grid.
  bool hold(const std::string& digits) const;

 private:
  TileGrid grid_;
  TileRange band_;
  uint64_t width_;
  std::vector<Hash> cells_;
};

}  // namespace lowbit::ckpt
