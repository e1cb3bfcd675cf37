#include "container/dcp/tiles.h"

#include <algorithm>
#include <cstring>

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMinTiled = 1u << 16;  // bytes of a chunk that has more than one cell
constexpr uint64_t kMinCellRow = 256;     // bytes of a row of a cell: shorter runs hash slowly
constexpr uint64_t kMaxBand = 8u << 20;   // bytes of a row of cells: what a load holds at a time
constexpr uint64_t kMaxParts = 1u << 15;  // twice as many are the most that readers take
constexpr uint64_t kGathered = 1u << 14;  // bytes of a cell's rows that are hashed at a time
constexpr uint64_t kShortRun = 1u << 11;  // bytes of a row of a cell that is worth gathering

/// Adds `count` rows to the cells of a row of them. Short runs are gathered first: to hash them one
/// by one takes twice as long.
void add_rows(std::vector<Hash>& cells, const char* rows, uint64_t count, uint64_t pitch,
              uint64_t cell) {
  char gathered[kGathered];
  for (size_t i = 0; i < cells.size(); ++i) {
    const uint64_t width = std::min(cell, pitch - i * cell);
    const char* from = rows + i * cell;
    const uint64_t at_once = width == 0 || width >= kShortRun ? 1 : kGathered / width;
    for (uint64_t r = 0; r < count; r += at_once) {
      const uint64_t n = std::min(at_once, count - r);
      if (n > 1) {
        for (uint64_t k = 0; k < n; ++k)
          std::memcpy(gathered + k * width, from + (r + k) * pitch, width);
      }
      cells[i].add(n > 1 ? gathered : from + r * pitch, n * width);
    }
  }
}

}  // namespace

TileGrid tile_grid(const Shape& shape, uint64_t width) {
  TileGrid grid;
  const uint64_t all = volume(shape);
  grid.rows = shape.empty() ? 1 : static_cast<uint64_t>(shape[0]);
  grid.cols = grid.rows == 0 ? 0 : all / grid.rows;
  if (all * width < kMinTiled) return grid;
  if (grid.cols >= 4 && grid.cols / 4 * width >= kMinCellRow) grid.across = 4;
  grid.down = std::min<uint64_t>(grid.rows, grid.across == 1 ? 16 : 4);
  while (grid.down < grid.rows && grid.down < kMaxParts &&
         grid.cell_rows() * grid.cols * width > kMaxBand)
    grid.down = std::min(grid.rows, 2 * grid.down);
  while (grid.down == grid.rows && grid.across < kMaxParts && grid.cell_cols() * width > kMaxBand)
    grid.across *= 2;
  // Parts of ceil(size / parts) may need fewer parts.
  grid.down = (grid.rows + grid.cell_rows() - 1) / grid.cell_rows();
  grid.across = (grid.cols + grid.cell_cols() - 1) / grid.cell_cols();
  return grid;
}

TileRange tile_range(const TileGrid& grid, const Shape& shape, const Box& box) {
  if (shape.empty()) return {0, 1, 0, 1};
  TileRange out{static_cast<uint64_t>(box.offset[0]), static_cast<uint64_t>(box.shape[0]), 0,
                grid.cols};
  Shape stride = row_major(shape);
  stride[0] = 0;  // of the columns alone
  out.first_col = position(box.offset, stride);
  out.cols = position(box.shape, stride) + 1 - position(Shape(shape.size(), 1), stride);
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
    if (at_ == 0 && grid_.across > 1 && bytes >= row_bytes_) {
      const uint64_t stop =
          std::min(grid_.rows, (row_ / grid_.cell_rows() + 1) * grid_.cell_rows());
      const uint64_t rows = std::min(bytes / row_bytes_, stop - row_);
      add_rows(open_, data, rows, row_bytes_, cell_bytes_);
      data += rows * row_bytes_;
      bytes -= rows * row_bytes_;
      row_ += rows - 1;
      end_row();
      continue;
    }
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

CellHashes::CellHashes(const TileGrid& grid, const TileRange& band, uint64_t width)
    : grid_(grid),
      band_(band),
      width_(width),
      cells_((band.cols + grid.cell_cols() - 1) / grid.cell_cols()) {}

void CellHashes::add(const char* data, uint64_t rows) {
  const uint64_t pitch = band_.cols * width_, cell = grid_.cell_cols() * width_;
  if (cells_.size() == 1) return cells_[0].add(data, rows * pitch);
  add_rows(cells_, data, rows, pitch, cell);
}

bool CellHashes::hold(const std::string& digits) const {
  if (grid_.down * grid_.across == 1) return cells_.size() == 1 && digits == cells_[0].hex();
  const uint64_t first =
      band_.first_row / grid_.cell_rows() * grid_.across + band_.first_col / grid_.cell_cols();
  for (size_t i = 0; i < cells_.size(); ++i) {
    if (digits.compare((first + i) * kTileDigits, kTileDigits, cells_[i].hex(), 0, kTileDigits) !=
        0)
      return false;
  }
  return true;
}

}  // namespace lowbit::ckpt
