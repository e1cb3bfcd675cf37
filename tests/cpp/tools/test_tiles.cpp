// The digests of a chunk's parts, against a plain reference that reads every element.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "check.h"
#include "container/dcp/tiles.h"

namespace {

using namespace lowbit::ckpt;

/// A chunk, and its digits by definition: docs/reference/ckpt-commands.md.
struct Case {
  Shape shape;
  uint64_t width;
  TileGrid grid;
  std::string values;

  std::string digits() const {
    std::map<std::pair<uint64_t, uint64_t>, std::string> cells;
    for (uint64_t r = 0; r < grid.rows; ++r) {
      for (uint64_t c = 0; c < grid.cols; ++c)
        cells[{r / grid.cell_rows(), c / grid.cell_cols()}] +=
            values.substr((r * grid.cols + c) * width, width);
    }
    std::string out;
    for (const auto& [place, bytes] : cells) {
      Hash hash;
      hash.add(bytes.data(), bytes.size());
      out += hash.hex().substr(0, kTileDigits);
    }
    return out;
  }
  std::string rectangle(const TileRange& range) const {
    std::string out;
    for (uint64_t r = range.first_row; r < range.first_row + range.rows; ++r)
      out += values.substr((r * grid.cols + range.first_col) * width, range.cols * width);
    return out;
  }
};

/// The smallest rectangle of the matrix that has every element of a box, by looking at each.
TileRange bounds(const Case& c, const Box& box) {
  const Shape stride = row_major(c.shape);
  uint64_t low_row = UINT64_MAX, high_row = 0, low_col = UINT64_MAX, high_col = 0;
  Shape at(box.shape.size(), 0);
  for (uint64_t n = 0; n < volume(box.shape); ++n) {
    uint64_t flat = 0, left = n;
    for (size_t d = box.shape.size(); d-- > 0;) {
      const auto size = static_cast<uint64_t>(box.shape[d]);
      flat +=
          (static_cast<uint64_t>(box.offset[d]) + left % size) * static_cast<uint64_t>(stride[d]);
      left /= size;
    }
    low_row = std::min(low_row, flat / c.grid.cols);
    high_row = std::max(high_row, flat / c.grid.cols);
    low_col = std::min(low_col, flat % c.grid.cols);
    high_col = std::max(high_col, flat % c.grid.cols);
  }
  return {low_row, high_row + 1 - low_row, low_col, high_col + 1 - low_col};
}

bool equal(const TileRange& a, const TileRange& b) {
  return a.first_row == b.first_row && a.rows == b.rows && a.first_col == b.first_col &&
         a.cols == b.cols;
}

/// Whether a rectangle of whole cells has the digests, by rows of cells and pieces of `rows` rows.
bool tiles_hold(const TileGrid& grid, const std::string& digits, const TileRange& range,
                const char* data, uint64_t width, uint64_t rows) {
  const uint64_t pitch = range.cols * width;
  bool hold = true;
  for (uint64_t row = range.first_row; row < range.first_row + range.rows;) {
    const uint64_t end =
        std::min(range.first_row + range.rows, (row / grid.cell_rows() + 1) * grid.cell_rows());
    CellHashes cells(grid, {row, end - row, range.first_col, range.cols}, width);
    for (; row < end; row += std::min(rows, end - row))
      cells.add(data + (row - range.first_row) * pitch, std::min(rows, end - row));
    hold = hold && cells.hold(digits);
  }
  return hold;
}

void test_grid(const Shape& shape, uint64_t width, TileGrid grid, std::mt19937_64& random) {
  Case c{shape, width, grid, std::string(volume(shape) * width, '\0')};
  for (char& byte : c.values) byte = static_cast<char>(random());
  const std::string what = shape_text(shape) + " of " + std::to_string(width) + " bytes, cells " +
                           std::to_string(grid.down) + " x " + std::to_string(grid.across);
  check(grid.rows * grid.cols == volume(shape), what + ": its matrix");
  const std::string digits = c.digits();
  TileHasher hasher(grid, width);
  for (uint64_t at = 0; at < c.values.size();) {
    const uint64_t n = std::min<uint64_t>(1 + random() % 5000, c.values.size() - at);
    hasher.add(c.values.data() + at, n);
    at += n;
  }
  check(hasher.digits() == digits, what + ": digits");
  // What a file says may be padded to its numbers of cells, where rows need fewer.
  std::string padded(grid.down * grid.across * kTileDigits, '0');
  const uint64_t across = (grid.cols + grid.cell_cols() - 1) / grid.cell_cols();
  for (uint64_t i = 0; i * kTileDigits < digits.size(); ++i)
    padded.replace((i / across * grid.across + i % across) * kTileDigits, kTileDigits,
                   digits.substr(i * kTileDigits, kTileDigits));
  for (int i = 0; i < 20; ++i) {
    Box box;
    for (const int64_t size : shape) {
      box.offset.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(size)));
      box.shape.push_back(
          1 + static_cast<int64_t>(random() % static_cast<uint64_t>(size - box.offset.back())));
    }
    const TileRange range = tile_range(grid, shape, box), whole = whole_tiles(grid, range);
    const bool few = volume(box.shape) < 20'000;
    if (few) check(equal(range, bounds(c, box)), what + ": a box's range");
    check(whole.first_row <= range.first_row && whole.first_col <= range.first_col &&
              whole.first_row + whole.rows >= range.first_row + range.rows &&
              whole.first_col + whole.cols >= range.first_col + range.cols &&
              whole.first_row + whole.rows <= grid.rows &&
              whole.first_col + whole.cols <= grid.cols &&
              whole.first_row % grid.cell_rows() == 0 && whole.first_col % grid.cell_cols() == 0,
          what + ": whole cells");
    std::string read = c.rectangle(whole);
    const uint64_t rows = 1 + random() % 100;
    check(tiles_hold(grid, padded, whole, read.data(), width, rows), what + ": cells that hold");
    read[random() % read.size()] ^= 1;
    check(!tiles_hold(grid, padded, whole, read.data(), width, rows), what + ": a flipped bit");
  }
}

void test_own_grids(std::mt19937_64& random) {
  const Shape shapes[] = {{512, 512},        {77, 1000},  {5, 7, 600},    {65536},     {65537},
                          {1, 70'000},       {2, 40'001}, {3, 1, 33'333}, {70'001, 1}, {17, 5'003},
                          {2, 3, 5, 7, 401}, {4099, 17},  {16, 1, 4096}};
  for (const Shape& shape : shapes) {
    for (const uint64_t width : {1u, 2u, 4u, 16u}) {
      const TileGrid grid = tile_grid(shape, width);
      check(volume(shape) * width < (1u << 16) || grid.down * grid.across > 1,
            shape_text(shape) + ": large chunks have cells");
      check(grid.down * grid.across <= 16, shape_text(shape) + ": 16 cells at most");
      if (grid.down * grid.across > 1) test_grid(shape, width, grid, random);
    }
  }
  // A load holds a row of cells at a time, however large the chunk is.
  for (const Shape& shape : {Shape{1 << 16, 1 << 14}, Shape{1 << 14, 1 << 18}, Shape{1, 1 << 30},
                             Shape{1 << 30}, Shape{3, 1 << 28}, Shape{(1 << 16) + 1, 5000}}) {
    const TileGrid grid = tile_grid(shape, 4);
    const uint64_t row = grid.cell_rows() == 1 ? grid.cell_cols() : grid.cols;
    check(grid.cell_rows() * row * 4 <= 8u << 20, shape_text(shape) + ": cells of some MiB");
    check(grid.down <= 1u << 16 && grid.across <= 1u << 16, "cells that readers take");
  }
  for (const Shape& shape :
       {Shape{}, Shape{0}, Shape{0, 4}, Shape{4, 0}, Shape{3}, Shape{2, 0, 5}}) {
    const TileGrid grid = tile_grid(shape, 4);
    check(grid.down == 1 && grid.across == 1, shape_text(shape) + ": one cell");
  }
}

/// Grids that a file may claim: more cells than rows, and counts that do not divide them.
void test_claimed_grids(std::mt19937_64& random) {
  for (int i = 0; i < 60; ++i) {
    const Shape shape = {1 + static_cast<int64_t>(random() % 40),
                         1 + static_cast<int64_t>(random() % 40)};
    TileGrid grid = tile_grid(shape, 2);
    grid.down = 1 + random() % 50;
    grid.across = 1 + random() % 50;
    if ((grid.rows + grid.cell_rows() - 1) / grid.cell_rows() <= grid.down) {
      Case c{shape, 2, grid, std::string(volume(shape) * 2, 'x')};
      std::string padded(grid.down * grid.across * kTileDigits, '0');
      const TileRange all{0, grid.rows, 0, grid.cols};
      check(!tiles_hold(grid, padded, all, c.values.data(), 2, 7), "zeros do not hold");
    }
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(7);
  test_own_grids(random);
  test_claimed_grids(random);
  return finish();
}
