#include "dialect/requantize/dequantize.h"

#include <algorithm>
#include <cstring>

#include "catalog/catalog.h"
#include "cpu/step.h"
#include "dialect/model/formats.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kDequantizePiece = 1u << 16;  // values at a time

/// Dequantizes codes [rows, row_bytes] tile by tile. A tile holds whole blocks, or a part of a
/// block that is longer than the kernels take.
class Dequantizer : public Floats {
 public:
  explicit Dequantizer(const Codes& codes)
      : codes_(codes),
        info_(state_info(std::max(0, find_state(codes.format)))),
        kernel_(cpu::kernels().dequantize[std::max(0, find_state(codes.format))]),
        row_bytes_(code_bytes(codes.cols, codes.bits)),
        blocks_(ceil_div(codes.cols, codes.block)) {}

  Status do_read(uint64_t first, uint64_t count, float* out) override {
    if (codes_.block <= 0 || codes_.block * codes_.bits % 8 != 0)
      return bad("blocks of " + std::to_string(codes_.block) + " codes of " +
                 std::to_string(codes_.bits) + " bits do not begin on a byte");
    while (count > 0) {
      const uint64_t n = std::min(count, kDequantizePiece);
      RETURN_IF_ERROR(
          read_piece(static_cast<int64_t>(first), static_cast<int64_t>(first + n), out));
      first += n, count -= n, out += n;
    }
    return fine();
  }

 protected:
  struct Tile {
    int64_t row, col;
    int n;
  };
  Tile tile_at(int64_t element) const {
    const int64_t row = element / codes_.cols, col = element % codes_.cols, block = codes_.block;
    const int64_t length =
        block > kMaxTile ? kMaxTile : block * std::max<int64_t>(1, kTile / block);
    const int64_t origin = block > kMaxTile ? col / block * block : 0;
    const int64_t start = origin + (col - origin) / length * length;
    int64_t end = std::min(start + length, codes_.cols);
    if (block > kMaxTile) end = std::min(end, origin + block);
    return {row, start, static_cast<int>(end - start)};
  }
  virtual Status prepare(int64_t begin, int64_t end) {
    const auto scale = [&](int64_t element) {
      return element / codes_.cols * blocks_ + element % codes_.cols / codes_.block;
    };
    first_scale_ = scale(begin);
    const auto numbers = static_cast<uint64_t>(info_.scale_numbers);
    const auto blocks = static_cast<uint64_t>(scale(end - 1) + 1 - first_scale_);
    scales_.resize(blocks * static_cast<uint64_t>(info_.scale_bytes));
    return codes_.scales->read(static_cast<uint64_t>(first_scale_) * numbers, blocks * numbers,
                               scales_.data());
  }
  virtual void dequantize(const Tile& t, const char* codes, float* out) {
    const int64_t scale = t.row * blocks_ + t.col / codes_.block - first_scale_;
    kernel_(codes, scales_.data() + scale * info_.scale_bytes,
            static_cast<int>(std::min<int64_t>(codes_.block, kMaxTile)), out, t.n);
  }

  const Codes codes_;
  const StateInfo info_;

 private:
  Status read_piece(int64_t begin, int64_t end, float* out) {
    const auto byte = [&](int64_t row, int64_t col) {
      return row * row_bytes_ + code_bytes(col, codes_.bits);
    };
    const Tile head = tile_at(begin), last = tile_at(end - 1);
    const int64_t from = byte(head.row, head.col), to = byte(last.row, last.col + last.n);
    const ScratchBuffer memory(bytes_, scales_);
    alignas(64) float tile[kMaxTile];
    bytes_.resize(static_cast<size_t>(to - from));
    RETURN_IF_ERROR(codes_.codes->read(static_cast<uint64_t>(from), bytes_.size(), bytes_.data()));
    RETURN_IF_ERROR(prepare(begin, end));
    for (int64_t at = begin; at < end;) {
      const Tile t = tile_at(at);
      const int64_t start = t.row * codes_.cols + t.col, stop = std::min(start + t.n, end);
      const char* in = bytes_.data() + byte(t.row, t.col) - from;
      if (start == at && stop == start + t.n) {
        dequantize(t, in, out + (at - begin));
      } else {
        dequantize(t, in, tile);
        std::memcpy(out + (at - begin), tile + (at - start),
                    static_cast<size_t>(stop - at) * sizeof(float));
      }
      at = stop;
    }
    return fine();
  }

  const cpu::DequantizeFn kernel_;
  const int64_t row_bytes_, blocks_;
  int64_t first_scale_ = 0;
  std::vector<char> bytes_, scales_;
};

/// The same with cross-tile scales.
class CrossTileDequantizer : public Dequantizer {
 public:
  CrossTileDequantizer(Codes codes, const Shape& shape, std::vector<CrossTileScale> scales)
      : Dequantizer((codes.block = kTile, codes)), scales_of_dims_(std::move(scales)) {
    for (const CrossTileScale& scale : scales_of_dims_) axes_.emplace_back(shape, scale.dim);
  }

 protected:
  Status prepare(int64_t, int64_t) override {
    if (!absmax_.empty()) return fine();
    if (!info_.cross_tile)
      return bad(codes_.format +
                 " has no cross-tile scales: it needs more than the largest magnitude");
    absmax_.resize(scales_of_dims_.size());
    for (size_t i = 0; i < scales_of_dims_.size(); ++i) {
      absmax_[i].resize(axes_[i].size);
      RETURN_IF_ERROR(scales_of_dims_[i].absmax->read(0, axes_[i].size, absmax_[i].data()));
    }
    return fine();
  }
  void dequantize(const Tile& t, const char* codes, float* out) override {
    uint32_t scale[kMaxTile];
    const auto first = static_cast<uint64_t>(t.row * codes_.cols + t.col);
    std::fill_n(scale, t.n, UINT32_MAX);
    for (size_t i = 0; i < axes_.size(); ++i) {
      for (int e = 0; e < t.n; ++e)
        scale[e] = std::min(scale[e], absmax_[i][axes_[i].at(first + static_cast<uint64_t>(e))]);
    }
    cpu::kernels().dequantize_given[find_state(codes_.format)](codes, scale, out, t.n);
  }

 private:
  const std::vector<CrossTileScale> scales_of_dims_;
  std::vector<Axis> axes_;
  std::vector<std::vector<uint32_t>> absmax_;
};

}  // namespace

Axis::Axis(const Shape& shape, int dim) {
  if (dim == CrossTileScale::kColumns) size = static_cast<uint64_t>(matrix_of(shape).cols);
  if (dim < 0) return;
  size = static_cast<uint64_t>(shape[static_cast<size_t>(dim)]);
  stride = static_cast<uint64_t>(row_major(shape)[static_cast<size_t>(dim)]);
}

std::shared_ptr<Floats> dequantized(const Codes& codes) {
  return std::make_shared<Dequantizer>(codes);
}

std::shared_ptr<Floats> dequantized_cross_tile(const Codes& codes, const Shape& shape,
                                               std::vector<CrossTileScale> scales) {
  return std::make_shared<CrossTileDequantizer>(codes, shape, std::move(scales));
}

}  // namespace lowbit::ckpt
