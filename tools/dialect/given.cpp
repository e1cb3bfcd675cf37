// Codes whose scales cover more than a block: one pass over the values finds the maxima, a second
// encodes. And the means of a factored second moment, which need a pass as well.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "catalog.h"
#include "core/bits.h"
#include "cpu/step.h"
#include "dialect/coding.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kPiece = 1 << 16;  // values at a time

class GivenEncoder {
 public:
  GivenEncoder(std::shared_ptr<Floats> values, const Shape& shape, int format,
               const std::vector<int>& dims, StateReport* report)
      : values_(std::move(values)),
        info_(state_info(format)),
        encode_(cpu::leaves().encode_given[format]),
        decode_(cpu::leaves().decode_given[format]),
        rows_(matrix_of(shape).rows),
        cols_(matrix_of(shape).cols),
        row_bytes_(code_bytes(cols_, info_.bits)),
        errors_(report) {
    for (const int dim : dims) {
      int64_t stride = 1, n = 1;
      if (dim == Maxima::kColumns) n = cols_;
      if (dim >= 0) {
        n = shape[static_cast<size_t>(dim)];
        for (size_t d = static_cast<size_t>(dim) + 1; d < shape.size(); ++d) stride *= shape[d];
      }
      axes_.push_back({stride, std::vector<uint32_t>(static_cast<size_t>(n), 0)});
    }
  }

  Status read_most(size_t axis, uint64_t first, uint64_t count, void* out) {
    const std::lock_guard lock(mutex_);
    LB_CHECK(measure());
    std::memcpy(out, axes_[axis].most.data() + first, count * 4);
    return fine();
  }

  Status read_codes(int64_t first, int64_t count, char* out) {
    if (count == 0) return fine();
    const std::lock_guard lock(mutex_);
    LB_CHECK(measure());
    constexpr int kMost = 256;  // values at a time, of one row: they begin on a byte
    float x[kMost], after[kMost];
    uint32_t least[kMost];
    uint64_t codes[kMost / 4];  // 16 bits a code at most, aligned
    const int64_t tile_bytes = code_bytes(kMost, info_.bits), end = first + count;
    for (int64_t at = first; at < end;) {
      const int64_t row = at / row_bytes_, tile = at % row_bytes_ / tile_bytes;
      const int64_t col = tile * kMost, start = row * row_bytes_ + tile * tile_bytes;
      const int n = static_cast<int>(std::min<int64_t>(kMost, cols_ - col));
      const int64_t e = row * cols_ + col;
      LB_CHECK(values_->read(static_cast<uint64_t>(e), static_cast<uint64_t>(n), x));
      spread(e, n, least);
      encode_(x, codes, least, n, nullptr);
      if (errors_.wanted() && start >= first) {
        decode_(codes, least, after, n);
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
  struct Axis {
    int64_t stride;
    std::vector<uint32_t> most;  // bits of magnitudes
  };

  Status measure() {
    if (measured_) return fine();
    std::vector<float> x(kPiece);
    for (int64_t at = 0; at < rows_ * cols_; at += kPiece) {
      const int64_t n = std::min(kPiece, rows_ * cols_ - at);
      LB_CHECK(values_->read(static_cast<uint64_t>(at), static_cast<uint64_t>(n), x.data()));
      for (Axis& axis : axes_) {
        const auto size = static_cast<int64_t>(axis.most.size());
        for (int64_t i = 0; i < n; ++i) {
          uint32_t& most = axis.most[static_cast<size_t>((at + i) / axis.stride % size)];
          most = std::max(most, magnitude_bits(x[static_cast<size_t>(i)]));
        }
      }
    }
    for (Axis& axis : axes_) {
      for (uint32_t& most : axis.most)
        most = most > kInfinityBits ? kCanonicalNan : most;  // one NaN for every processor
    }
    measured_ = true;
    return fine();
  }
  void spread(int64_t first, int n, uint32_t* least) const {
    std::fill_n(least, n, UINT32_MAX);
    for (const Axis& axis : axes_) {
      const auto size = static_cast<int64_t>(axis.most.size());
      for (int i = 0; i < n; ++i)
        least[i] =
            std::min(least[i], axis.most[static_cast<size_t>((first + i) / axis.stride % size)]);
    }
  }

  const std::shared_ptr<Floats> values_;
  const StateInfo info_;
  const cpu::EncodeGivenFn encode_;
  const cpu::DecodeGivenFn decode_;
  const int64_t rows_, cols_, row_bytes_;
  std::mutex mutex_;
  ErrorSum errors_;
  std::vector<Axis> axes_;
  bool measured_ = false;
};

class GivenSource : public Source {
 public:
  GivenSource(std::shared_ptr<GivenEncoder> encoder, int axis)
      : encoder_(std::move(encoder)), axis_(axis) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    if (axis_ >= 0) return encoder_->read_most(static_cast<size_t>(axis_), first, count, out);
    return encoder_->read_codes(static_cast<int64_t>(first), static_cast<int64_t>(count),
                                static_cast<char*>(out));
  }

 private:
  const std::shared_ptr<GivenEncoder> encoder_;
  const int axis_;  // -1: codes
};

/// Means over the last, or over the last but one dimension, of [batches, rows, cols].
class MeanFloats : public Floats {
 public:
  MeanFloats(std::shared_ptr<Floats> values, const Shape& shape, bool of_rows)
      : values_(std::move(values)),
        rows_(shape[shape.size() - 2]),
        cols_(shape[shape.size() - 1]),
        of_rows_(of_rows) {}

  Status read(uint64_t first, uint64_t count, float* out) override {
    const int64_t length = of_rows_ ? rows_ : cols_;
    for (uint64_t i = 0; i < count; ++i) {
      const auto at = static_cast<int64_t>(first + i);
      LB_CHECK(measure(at / length, of_rows_ ? at % length : -1));
      out[i] = of_rows_ ? mean_ : means_[static_cast<size_t>(at % length)];
    }
    return fine();
  }

 private:
  /// One row's mean, or those of all columns of a batch.
  Status measure(int64_t batch, int64_t row) {
    if (row < 0 && batch == batch_) return fine();
    const int64_t from = row < 0 ? 0 : row, to = row < 0 ? rows_ : row + 1;
    std::vector<double> sums(static_cast<size_t>(row < 0 ? cols_ : 0));
    double all = 0;
    std::vector<float> x(static_cast<size_t>(std::min(kPiece, std::max<int64_t>(cols_, 1))));
    for (int64_t r = from; r < to; ++r) {
      for (int64_t c = 0; c < cols_; c += kPiece) {
        const int64_t n = std::min(kPiece, cols_ - c);
        LB_CHECK(values_->read(static_cast<uint64_t>((batch * rows_ + r) * cols_ + c),
                               static_cast<uint64_t>(n), x.data()));
        for (int64_t i = 0; i < n; ++i) {
          if (row < 0) {
            sums[static_cast<size_t>(c + i)] += static_cast<double>(x[static_cast<size_t>(i)]);
          } else {
            all += static_cast<double>(x[static_cast<size_t>(i)]);
          }
        }
      }
    }
    mean_ = static_cast<float>(all / static_cast<double>(cols_));
    if (row < 0) {
      means_.clear();
      for (const double sum : sums)
        means_.push_back(static_cast<float>(sum / static_cast<double>(rows_)));
      batch_ = batch;
    }
    return fine();
  }

  const std::shared_ptr<Floats> values_;
  const int64_t rows_, cols_;
  const bool of_rows_;
  int64_t batch_ = -1;
  float mean_ = 0;
  std::vector<float> means_;
};

}  // namespace

Codes encoded_given(std::shared_ptr<Floats> values, const Shape& shape, const std::string& format,
                    const std::vector<int>& dims, std::vector<Maxima>& maxima,
                    StateReport* report) {
  const int index = find_state(format);
  const auto encoder =
      std::make_shared<GivenEncoder>(std::move(values), shape, index, dims, report);
  if (report != nullptr) report->exact = false;
  const auto [rows, cols] = matrix_of(shape);
  Codes out{format, state_info(index).bits, rows, cols, 0, nullptr, nullptr};
  out.codes = std::make_shared<GivenSource>(encoder, -1);
  maxima.clear();
  for (size_t i = 0; i < dims.size(); ++i)
    maxima.push_back({dims[i], std::make_shared<GivenSource>(encoder, static_cast<int>(i))});
  return out;
}

std::shared_ptr<Floats> means_of(std::shared_ptr<Floats> values, const Shape& shape, bool of_rows) {
  return std::make_shared<MeanFloats>(std::move(values), shape, of_rows);
}

}  // namespace lowbit::ckpt
