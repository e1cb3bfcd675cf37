#include "pipeline/health.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "dialect/model/formats.h"
#include "dialect/numbers/floats.h"
#include "dialect/numbers/square_sum.h"
#include "dialect/requantize/dequantize.h"
#include "dialect/requantize/quantize.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kHealthPiece = 1u << 16;

/// For each code of a format, whether it is that of the lowest or the highest value but 0: what
/// values beyond a format's range become.
Result<std::vector<bool>> ends_of(const std::string& format, int bits, bool is_signed) {
  constexpr int kWide = 2048;
  std::vector<float> sample(kWide);
  for (int i = 0; i < kWide; ++i)
    sample[static_cast<size_t>(i)] =
        std::ldexp(is_signed && i >= kWide / 2 ? -1.0f : 1.0f, -(i % 21));
  const auto samples = floats_by([sample](uint64_t first, uint64_t count, float* out) {
    std::copy_n(sample.begin() + static_cast<std::ptrdiff_t>(first), count, out);
    return fine();
  });
  Codes every = quantized(samples, {1, kWide}, format, kWide, nullptr);
  const int count = 1 << bits;
  every.cols = std::min(count, kWide);
  every.rows = 1;
  std::string packed(static_cast<size_t>(count) * static_cast<size_t>(bits) / 8, '\0');
  for (int code = 0; code < count; ++code) {
    for (int bit = 0; bit < bits; ++bit) {
      const int at = code * bits + bit;
      packed[static_cast<size_t>(at / 8)] =
          static_cast<char>(packed[static_cast<size_t>(at / 8)] | (code >> bit & 1) << at % 8);
    }
  }
  every.codes = constant_source(packed, 1);
  std::vector<float> values(static_cast<size_t>(every.cols));
  RETURN_IF_ERROR(dequantized(every)->read(0, values.size(), values.data()));
  float low = std::numeric_limits<float>::infinity(), high = -low;
  const auto usable = [&](float v) {
    return std::isfinite(v) && (is_signed ? v != 0.0f : v > 0.0f);
  };
  for (const float v : values) {
    if (usable(v)) low = std::min(low, v), high = std::max(high, v);
  }
  std::vector<bool> ends;
  for (const float v : values) ends.push_back(usable(v) && (v == low || v == high));
  return ends;
}

/// The codes of a range of elements of a packed state, one for each element.
class Unpacker {
 public:
  explicit Unpacker(const Codes& codes) : codes_(codes) {}
  Status read(uint64_t first, uint64_t count, uint16_t* out) {
    const auto cols = static_cast<uint64_t>(codes_.cols), bits = static_cast<uint64_t>(codes_.bits);
    const uint64_t row_bytes = (cols * bits + 7) / 8;
    while (count > 0) {
      const uint64_t row = first / cols, col = first % cols, n = std::min(count, cols - col);
      const uint64_t begin = col * bits / 8, end = ((col + n) * bits + 7) / 8;
      bytes_.resize(end - begin + 2);
      RETURN_IF_ERROR(codes_.codes->read(row * row_bytes + begin, end - begin, bytes_.data()));
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t bit = (col + i) * bits - begin * 8;
        const auto byte = [&](uint64_t k) {
          return static_cast<uint32_t>(static_cast<unsigned char>(bytes_[bit / 8 + k]));
        };
        out[i] = static_cast<uint16_t>((byte(0) | byte(1) << 8) >> bit % 8 & ((1u << bits) - 1));
      }
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  const Codes& codes_;
  std::string bytes_;
};

/// The largest magnitude in each cell of a picture.
class Cells {
 public:
  Cells(const Shape& shape, Health& health) : health_(health) {
    rows_ = shape.size() > 1 ? static_cast<uint64_t>(shape[0]) : 1;
    cols_ = std::max<uint64_t>(1, rows_ == 0 ? 1 : volume(shape) / rows_);
    health.cell_rows = static_cast<int>(std::min<uint64_t>(rows_, Health::kCells));
    health.cell_cols = static_cast<int>(std::min<uint64_t>(cols_, Health::kCells));
    health.cells.assign(static_cast<size_t>(health.cell_rows * health.cell_cols), 0.0f);
  }
  void take(uint64_t element, float magnitude) {
    const uint64_t r = element / cols_ * static_cast<uint64_t>(health_.cell_rows) / rows_;
    const uint64_t c = element % cols_ * static_cast<uint64_t>(health_.cell_cols) / cols_;
    float& cell = health_.cells[r * static_cast<uint64_t>(health_.cell_cols) + c];
    cell = std::max(cell, magnitude);
  }

 private:
  Health& health_;
  uint64_t rows_, cols_;
};

}  // namespace

Result<Health> health_of(const State& state) {
  Health h;
  h.elements = volume(state.shape);
  std::vector<bool> ends;
  // Codes of 16 bits have no picture: there are too many of them.
  h.coded = state.codes.has_value() && state.codes->bits <= 8;
  if (h.coded) {
    ASSIGN_OR_RETURN(found, ends_of(state.codes->format, state.codes->bits, state.is_signed));
    ends = std::move(found);
  }
  h.histogram.assign(h.coded ? size_t{1} << state.codes->bits : 128, 0);
  if (h.elements == 0) return h;
  Cells cells(state.shape, h);
  h.minimum = std::numeric_limits<double>::infinity();
  SquareSum squares;
  std::vector<double> values(std::min(kHealthPiece, h.elements));
  std::vector<uint16_t> codes(h.coded ? values.size() : 0);
  std::optional<Unpacker> unpacker;
  if (h.coded) unpacker.emplace(*state.codes);
  for (uint64_t at = 0; at < h.elements; at += values.size()) {
    const uint64_t n = std::min<uint64_t>(values.size(), h.elements - at);
    RETURN_IF_ERROR(state.values->read_doubles(at, n, values.data()));
    if (h.coded) RETURN_IF_ERROR(unpacker->read(at, n, codes.data()));
    for (uint64_t i = 0; i < n; ++i) {
      const double x = values[i], magnitude = std::abs(x);
      if (h.coded) {
        ++h.histogram[codes[i]];
        h.saturated += ends[codes[i]] && x != 0;
      }
      if (!std::isfinite(x)) {
        ++(std::isnan(x) ? h.nan : h.infinite);
        continue;
      }
      h.negative += x < 0;
      if (x == 0) {
        ++h.zero;
        continue;
      }
      h.minimum = std::min(h.minimum, magnitude);
      h.limit = std::max(h.limit, magnitude);
      squares.add(x);
      cells.take(at + i, static_cast<float>(
                             std::min<double>(magnitude, std::numeric_limits<float>::max())));
      if (!h.coded) ++h.histogram[static_cast<size_t>(std::clamp(std::ilogb(x) + 64, 0, 127))];
    }
  }
  if (h.limit == 0) h.minimum = 0;
  const uint64_t finite = h.elements - h.nan - h.infinite;
  h.root_mean_square = finite == 0 ? 0 : squares.root(static_cast<double>(finite));
  for (const uint64_t count : h.histogram) h.used += count > 0;
  return h;
}

}  // namespace lowbit::ckpt
