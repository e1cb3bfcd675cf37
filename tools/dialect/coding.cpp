#include "dialect/coding.h"

#include <algorithm>
#include <cstring>

#include "catalog.h"
#include "cpu/step.h"
#include "io/lent.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 1u << 16;  // values at a time

/// Codes [rows, row_bytes] to values, tile by tile. A tile holds whole blocks, or a part of one that
/// is longer than the leaves take.
class Decoder : public Floats {
 public:
  explicit Decoder(const Codes& codes)
      : codes_(codes),
        info_(state_info(std::max(0, find_state(codes.format)))),
        leaf_(cpu::leaves().decode[std::max(0, find_state(codes.format))]),
        row_bytes_(code_bytes(codes.cols, codes.bits)),
        blocks_(ceil_div(codes.cols, codes.block)) {}

  Status read(uint64_t first, uint64_t count, float* out) override {
    if (codes_.block <= 0 || codes_.block * codes_.bits % 8 != 0)
      return bad("blocks of " + std::to_string(codes_.block) + " codes of " +
                 std::to_string(codes_.bits) + " bits do not begin on a byte");
    while (count > 0) {
      const uint64_t n = std::min(count, kPiece);
      LB_CHECK(read_piece(static_cast<int64_t>(first), static_cast<int64_t>(first + n), out));
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
        block > kMostTile ? kMostTile : block * std::max<int64_t>(1, kTile / block);
    const int64_t origin = block > kMostTile ? col / block * block : 0;
    const int64_t start = origin + (col - origin) / length * length;
    int64_t end = std::min(start + length, codes_.cols);
    if (block > kMostTile) end = std::min(end, origin + block);
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
  virtual void decode(const Tile& t, const char* codes, float* out) {
    const int64_t scale = t.row * blocks_ + t.col / codes_.block - first_scale_;
    leaf_(codes, scales_.data() + scale * info_.scale_bytes,
          static_cast<int>(std::min<int64_t>(codes_.block, kMostTile)), out, t.n);
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
    const Lent memory(bytes_, scales_);
    alignas(64) float tile[kMostTile];
    bytes_.resize(static_cast<size_t>(to - from));
    LB_CHECK(codes_.codes->read(static_cast<uint64_t>(from), bytes_.size(), bytes_.data()));
    LB_CHECK(prepare(begin, end));
    for (int64_t at = begin; at < end;) {
      const Tile t = tile_at(at);
      const int64_t start = t.row * codes_.cols + t.col, stop = std::min(start + t.n, end);
      const char* in = bytes_.data() + byte(t.row, t.col) - from;
      if (start == at && stop == start + t.n) {
        decode(t, in, out + (at - begin));
      } else {
        decode(t, in, tile);
        std::memcpy(out + (at - begin), tile + (at - start),
                    static_cast<size_t>(stop - at) * sizeof(float));
      }
      at = stop;
    }
    return fine();
  }

  const cpu::DecodeFn leaf_;
  const int64_t row_bytes_, blocks_;
  int64_t first_scale_ = 0;
  std::vector<char> bytes_, scales_;
};

/// The same with maxima for scales.
class GivenDecoder : public Decoder {
 public:
  GivenDecoder(Codes codes, const Shape& shape, std::vector<Maxima> maxima)
      : Decoder((codes.block = kTile, codes)), shape_(shape), maxima_(std::move(maxima)) {}

 protected:
  Status prepare(int64_t, int64_t) override {
    if (!most_.empty()) return fine();
    if (!info_.measurable)
      return bad(codes_.format + " needs more than the largest magnitude for a scale");
    most_.resize(maxima_.size());
    for (size_t i = 0; i < maxima_.size(); ++i) {
      const int dim = maxima_[i].dim;
      const int64_t n = dim == Maxima::kWhole     ? 1
                        : dim == Maxima::kColumns ? codes_.cols
                                                  : shape_[static_cast<size_t>(dim)];
      most_[i].resize(static_cast<size_t>(n));
      LB_CHECK(maxima_[i].most->read(0, static_cast<uint64_t>(n), most_[i].data()));
    }
    return fine();
  }
  void decode(const Tile& t, const char* codes, float* out) override {
    uint32_t least[kMostTile];
    const int64_t first = t.row * codes_.cols + t.col;
    std::fill_n(least, t.n, UINT32_MAX);
    for (size_t i = 0; i < maxima_.size(); ++i) {
      const int dim = maxima_[i].dim;
      int64_t stride = 1;
      if (dim >= 0) {
        for (size_t d = static_cast<size_t>(dim) + 1; d < shape_.size(); ++d) stride *= shape_[d];
      }
      const auto n = static_cast<int64_t>(most_[i].size());
      for (int e = 0; e < t.n; ++e) {
        const int64_t at = dim == Maxima::kWhole ? 0 : (first + e) / stride % n;
        least[e] = std::min(least[e], most_[i][static_cast<size_t>(at)]);
      }
    }
    cpu::leaves().decode_given[find_state(codes_.format)](codes, least, out, t.n);
  }

 private:
  const Shape shape_;
  const std::vector<Maxima> maxima_;
  std::vector<std::vector<uint32_t>> most_;
};

std::vector<FormatInfo> all_formats() {
  std::vector<FormatInfo> all;
  for (int i = 0; i < state_count(); ++i) {
    const StateInfo s = state_info(i);
    all.push_back({s.name, s.bits, s.block, s.scaled, s.is_signed, find_dtype(s.dtype),
                   s.scaled ? find_dtype(s.scale_dtype) : nullptr, s.scale_numbers, s.measurable});
  }
  return all;
}

}  // namespace

const FormatInfo* find_format(const std::string& name) {
  static const std::vector<FormatInfo> all = all_formats();
  for (const FormatInfo& f : all) {
    if (f.name == name) return &f;
  }
  return nullptr;
}

std::shared_ptr<Floats> decoded(const Codes& codes) { return std::make_shared<Decoder>(codes); }

std::shared_ptr<Floats> decoded_given(const Codes& codes, const Shape& shape,
                                      std::vector<Maxima> maxima) {
  return std::make_shared<GivenDecoder>(codes, shape, std::move(maxima));
}

std::vector<float> map_of(const std::string& format) {
  const FormatInfo* info = find_format(format);
  const int count = 1 << info->bits;
  // All codes in a block of their own, with a scale of 1.
  std::vector<uint8_t> bytes(256);
  for (int k = 0; k < count; ++k) {
    const int bit = k * info->bits;
    for (int b = 0; b < info->bits; ++b)
      bytes[static_cast<size_t>((bit + b) / 8)] |=
          static_cast<uint8_t>((k >> b & 1) << ((bit + b) % 8));
  }
  std::vector<float> map(static_cast<size_t>(count), 0.0f), scales(64, 1.0f);
  cpu::leaves().decode[find_state(format)](bytes.data(), scales.data(), 256, map.data(), count);
  return map;
}

}  // namespace lowbit::ckpt
