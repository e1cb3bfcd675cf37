#include "container/dcp/tiles.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMinTiled = 1u << 16;  // bytes of a chunk that has more than one cell
constexpr uint64_t kMinCellRow = 256;     // bytes of a row of a cell: shorter runs hash slowly

}  // namespace

TileGrid tile_grid(const Shape& shape, uint64_t width) {
  TileGrid grid;
  const uint64_t all = volume(shape);
  grid.rows = shape.empty() ? 1 : static_cast<uint64_t>(shape[0]);
  grid.cols = grid.rows == 0 ? 0 : all / grid.rows;
  if (all * width < kMinTiled) return grid;
  if (grid.cols >= 4 && grid.cols / 4 * width >= kMinCellRow) grid.across = 4;
  grid.down = std::min<uint64_t>(grid.rows, grid.across == 1 ? 16 : 4);
  // Parts of ceil(size / parts) may need fewer parts.
  grid.down = (grid.rows + grid.cell_rows() - 1) / grid.cell_rows();
  grid.across = (grid.cols + grid.cell_cols() - 1) / grid.cell_cols();
  return grid;
}

TileRange tile_range(const TileGrid& grid, const Shape& shape, const Box& box) {
  if (shape.empty()) return {0, 1, 0, 1};
  TileRange out{static_cast<uint64_t>(box.offset[0]), static_cast<uint64_t>(box.shape[0]), 0,
                grid.cols};
  uint64_t first = 0, last = 0;
  const Shape stride = row_major(shape);
  for (size_t d = 1; d < shape.size(); ++d) {
    first += static_cast<uint64_t>(box.offset[d] * stride[d]);
    last += static_cast<uint64_t>((box.offset[d] + box.shape[d] - 1) * stride[d]);
  }
  out.first_col = first;
  out.cols = last + 1 - first;
  return out;
}

TileRange whole_tiles(const TileGrid& grid, const TileRange& range) {
  const auto widened = [](uint64_t& first, uint64_t& count, uint64_t cell, uint64_t all) {
    const uint64_t end = std::min(all, (first + count + cell - 1) / cell * cell);
    first = first / cell * cell;
    count = end - first;
  };
  TileRange out = range;
  widened(out.first_row, out.rows, grid.cell_rows(), grid.rows);
  widened(out.first_col, out.cols, grid.cell_cols(), grid.cols);
  return out;
}

TileHasher::TileHasher(const TileGrid& grid, uint64_t width)
    : grid_(grid), row_bytes_(grid.cols * width), cell_bytes_(grid.cell_cols() * width) {
  open_.resize(grid.across);
}

void TileHasher::add(const char* data, uint64_t bytes) {
  while (bytes > 0) {
    const uint64_t cell = at_ / cell_bytes_;
    const uint64_t stop = std::min(row_bytes_, (cell + 1) * cell_bytes_);
    const uint64_t n = std::min(bytes, stop - at_);
    open_[cell].add(data, n);
    data += n;
    bytes -= n;
    at_ += n;
    if (at_ == row_bytes_) end_row();
  }
}

void TileHasher::end_row() {
  at_ = 0;
  ++row_;
  if (row_ % grid_.cell_rows() != 0 && row_ != grid_.rows) return;
  for (Hash& hash : open_) {
    digits_ += hash.hex().substr(0, kTileDigits);
    hash = Hash();
  }
}

bool tiles_hold(const TileGrid& grid, const std::string& digits, const TileRange& range,
                const char* data, uint64_t width) {
  const uint64_t pitch = range.cols * width;
  for (uint64_t row = range.first_row; row < range.first_row + range.rows;
       row += grid.cell_rows()) {
    const uint64_t rows = std::min(grid.cell_rows(), grid.rows - row);
    for (uint64_t col = range.first_col; col < range.first_col + range.cols;
         col += grid.cell_cols()) {
      const uint64_t cols = std::min(grid.cell_cols(), grid.cols - col);
      Hash hash;
      const char* at = data + (row - range.first_row) * pitch + (col - range.first_col) * width;
      if (cols == range.cols) {
        hash.add(at, rows * pitch);
      } else {
        for (uint64_t r = 0; r < rows; ++r) hash.add(at + r * pitch, cols * width);
      }
      const uint64_t cell = row / grid.cell_rows() * grid.across + col / grid.cell_cols();
      if (digits.compare(cell * kTileDigits, kTileDigits, hash.hex(), 0, kTileDigits) != 0)
        return false;
    }
  }
  return true;
}

}  // namespace lowbit::ckpt
