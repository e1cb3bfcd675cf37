#include "dialect/numbers/means.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

constexpr int64_t kMeansPiece = 1 << 16;  // values at a time

/// Means over the last, or over the last but one dimension, of [batches, rows, cols].
class MeanFloats : public Floats {
 public:
  MeanFloats(std::shared_ptr<Floats> values, const Shape& shape, bool of_rows)
      : values_(std::move(values)),
        rows_(shape[shape.size() - 2]),
        cols_(shape[shape.size() - 1]),
        of_rows_(of_rows) {}

  Status do_read(uint64_t first, uint64_t count, float* out) override {
    const int64_t length = of_rows_ ? rows_ : cols_;
    for (uint64_t i = 0; i < count; ++i) {
      const auto at = static_cast<int64_t>(first + i);
      RETURN_IF_ERROR(measure(at / length, of_rows_ ? at % length : -1));
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
    std::vector<float> x(static_cast<size_t>(std::min(kMeansPiece, std::max<int64_t>(cols_, 1))));
    for (int64_t r = from; r < to; ++r) {
      for (int64_t c = 0; c < cols_; c += kMeansPiece) {
        const int64_t n = std::min(kMeansPiece, cols_ - c);
        RETURN_IF_ERROR(values_->read(static_cast<uint64_t>((batch * rows_ + r) * cols_ + c),
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

std::shared_ptr<Floats> means_of(std::shared_ptr<Floats> values, const Shape& shape, bool of_rows) {
  return std::make_shared<MeanFloats>(std::move(values), shape, of_rows);
}

}  // namespace lowbit::ckpt
