#include "dialect/requantize/cross_tile_quantize.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "catalog/catalog.h"
#include "core/bits.h"
#include "cpu/step.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/dequantize.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kCrossTilePiece = 1 << 16;  // values at a time

/// Measures the scales with the first read, and quantizes by them with each. The sources of codes
/// and of scales share one.
class CrossTileQuantizer {
 public:
  CrossTileQuantizer(std::shared_ptr<Floats> values, const Shape& shape, int format,
                     const std::vector<int>& dims, StateReport* report)
      : values_(std::move(values)),
        info_(state_info(format)),
        quantize_(cpu::kernels().quantize_given[format]),
        dequantize_(cpu::kernels().dequantize_given[format]),
        rows_(matrix_of(shape).rows),
        cols_(matrix_of(shape).cols),
        row_bytes_(code_bytes(cols_, info_.bits)),
        errors_(report) {
    for (const int dim : dims) {
      const Axis axis(shape, dim);
      axes_.push_back({axis, std::vector<uint32_t>(axis.size, 0)});
    }
  }

  Status read_absmax(size_t axis, uint64_t first, uint64_t count, void* out) {
    const std::lock_guard lock(mutex_);
    RETURN_IF_ERROR(measure());
    std::memcpy(out, axes_[axis].absmax.data() + first, count * 4);
    return fine();
  }

  Status read_codes(int64_t first, int64_t count, char* out) {
    if (count == 0) return fine();
    const std::lock_guard lock(mutex_);
    RETURN_IF_ERROR(measure());
    constexpr int kTileValues = 256;  // values at a time, of one row: they begin on a byte
    float x[kTileValues], after[kTileValues];
    uint32_t scale[kTileValues];
    uint64_t codes[kTileValues / 4];  // 16 bits a code at most, aligned
    const int64_t tile_bytes = code_bytes(kTileValues, info_.bits), end = first + count;
    for (int64_t at = first; at < end;) {
      const int64_t row = at / row_bytes_, tile = at % row_bytes_ / tile_bytes;
      const int64_t col = tile * kTileValues, start = row * row_bytes_ + tile * tile_bytes;
      const int n = static_cast<int>(std::min<int64_t>(kTileValues, cols_ - col));
      const int64_t e = row * cols_ + col;
      RETURN_IF_ERROR(values_->read(static_cast<uint64_t>(e), static_cast<uint64_t>(n), x));
      spread(e, n, scale);
      quantize_(x, codes, scale, n, nullptr);
      if (errors_.wanted() && start >= first) {
        dequantize_(codes, scale, after, n);
        errors_.add(x, after, static_cast<uint64_t>(n));
      }
      const int64_t stop = std::min(end, start + code_bytes(n, info_.bits));
      std::memcpy(out + (at - first), reinterpret_cast<const char*>(codes) + (at - start),
                  static_cast<size_t>(stop - at));
      at = stop;
    }
    return fine();
  }

 private:
  struct Measured {
    Axis axis;
    std::vector<uint32_t> absmax;  // bits of magnitudes
  };

  Status measure() {
    if (measured_) return fine();
    std::vector<float> x(kCrossTilePiece);
    for (int64_t at = 0; at < rows_ * cols_; at += kCrossTilePiece) {
      const int64_t n = std::min(kCrossTilePiece, rows_ * cols_ - at);
      RETURN_IF_ERROR(values_->read(static_cast<uint64_t>(at), static_cast<uint64_t>(n), x.data()));
      for (auto& [axis, all] : axes_) {
        for (int64_t i = 0; i < n; ++i) {
          uint32_t& absmax = all[axis.at(static_cast<uint64_t>(at + i))];
          absmax = std::max(absmax, magnitude_bits(x[static_cast<size_t>(i)]));
        }
      }
    }
    for (auto& [axis, all] : axes_) {
      for (uint32_t& absmax : all)
        absmax = absmax > kInfinityBits ? kCanonicalNan : absmax;  // one NaN for every processor
    }
    measured_ = true;
    return fine();
  }
  void spread(int64_t first, int n, uint32_t* scale) const {
    std::fill_n(scale, n, UINT32_MAX);
    for (const auto& [axis, absmax] : axes_) {
      for (int i = 0; i < n; ++i)
        scale[i] = std::min(scale[i], absmax[axis.at(static_cast<uint64_t>(first + i))]);
    }
  }

  const std::shared_ptr<Floats> values_;
  const StateInfo info_;
  const cpu::QuantizeGivenFn quantize_;
  const cpu::DequantizeGivenFn dequantize_;
  const int64_t rows_, cols_, row_bytes_;
  std::mutex mutex_;
  ErrorSum errors_;
  std::vector<Measured> axes_;
  bool measured_ = false;
};

}  // namespace

Codes quantized_cross_tile(std::shared_ptr<Floats> values, const Shape& shape,
                           const std::string& format, const std::vector<int>& dims,
                           std::vector<CrossTileScale>& scales, StateReport* report) {
  const int index = find_state(format);
  const auto quantizer =
      std::make_shared<CrossTileQuantizer>(std::move(values), shape, index, dims, report);
  if (report != nullptr) report->exact = false;
  const auto [rows, cols] = matrix_of(shape);
  Codes out{format, state_info(index).bits, rows, cols, 0, nullptr, nullptr};
  out.codes = source_by([quantizer](uint64_t first, uint64_t count, void* to) {
    return quantizer->read_codes(static_cast<int64_t>(first), static_cast<int64_t>(count),
                                 static_cast<char*>(to));
  });
  scales.clear();
  for (size_t i = 0; i < dims.size(); ++i)
    scales.push_back({dims[i], source_by([quantizer, i](uint64_t first, uint64_t count, void* to) {
                        return quantizer->read_absmax(i, first, count, to);
                      })});
  return out;
}

}  // namespace lowbit::ckpt
