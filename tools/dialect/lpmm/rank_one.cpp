#include "dialect/lpmm/rank_one.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "dialect/numbers/floats.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {
namespace {

/// The least, and NaN where one is NaN, as torch's min and max have it.
float least_of(float a, float b) { return std::isnan(b) ? b : std::min(a, b); }
float most_of(float a, float b) { return std::isnan(b) ? b : std::max(a, b); }

/// Dequantized values: the scale of an element is the least of those that cover it.
class RankOne : public Floats {
 public:
  RankOne(std::vector<float> map, const BlockLayout& layout, std::shared_ptr<Source> codes,
          const Shape& shape, std::vector<CrossTileScale> scales)
      : map_(std::move(map)),
        codes_(std::move(codes), layout),
        scales_(std::move(scales)),
        absmax_(scales_.size()) {
    for (const CrossTileScale& scale : scales_) axes_.emplace_back(shape, scale.dim);
  }

  Status do_read(uint64_t first, uint64_t count, float* out) override {
    for (size_t k = 0; k < scales_.size(); ++k) {
      if (!absmax_[k].empty()) continue;
      absmax_[k].resize(axes_[k].size);
      RETURN_IF_ERROR(scales_[k].absmax->read(0, absmax_[k].size(), absmax_[k].data()));
    }
    while (count > 0) {
      const uint64_t n = std::min<uint64_t>(count, 1u << 15);
      const ScratchBuffer memory(buffer_);
      buffer_.resize(n);
      RETURN_IF_ERROR(codes_.read(first, n, buffer_.data()));
      for (uint64_t i = 0; i < n; ++i) {
        float scale = std::numeric_limits<float>::infinity();
        for (size_t k = 0; k < scales_.size(); ++k)
          scale = least_of(scale, absmax_[k][axes_[k].at(first + i)]);
        out[i] = map_[std::min<size_t>(buffer_[i], map_.size() - 1)] * scale;
      }
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  const std::vector<float> map_;
  CodeReader codes_;
  const std::vector<CrossTileScale> scales_;
  std::vector<Axis> axes_;
  std::vector<std::vector<float>> absmax_;
  std::vector<uint16_t> buffer_;
};

/// The absmax along each dimension, measured once for the sources that need it.
class Measured {
 public:
  Measured(std::shared_ptr<Floats> values, const Shape& shape)
      : values_(std::move(values)), count_(volume(shape)) {
    for (size_t d = 0; d < shape.size(); ++d) axes_.emplace_back(shape, static_cast<int>(d));
  }

  Status measure() {
    const std::lock_guard lock(mutex_);
    if (!absmax.empty()) return fine();
    std::vector<std::vector<float>> found;
    for (const Axis& axis : axes_) found.emplace_back(axis.size, 0.0f);
    std::vector<float> x;
    for (uint64_t at = 0; at < count_;) {
      x.resize(std::min<uint64_t>(count_ - at, 1u << 15));
      RETURN_IF_ERROR(values_->read(at, x.size(), x.data()));
      for (size_t i = 0; i < x.size(); ++i) {
        for (size_t d = 0; d < axes_.size(); ++d) {
          float& m = found[d][axes_[d].at(at + i)];
          m = most_of(m, std::fabs(x[i]));
        }
      }
      at += x.size();
    }
    absmax = std::move(found);
    return fine();
  }
  float scale(uint64_t element) const {
    float least = absmax[0][axes_[0].at(element)];
    for (size_t d = 1; d < axes_.size(); ++d)
      least = least_of(least, absmax[d][axes_[d].at(element)]);
    return least;
  }
  Floats& values() { return *values_; }

  std::vector<std::vector<float>> absmax;

 private:
  const std::shared_ptr<Floats> values_;
  const uint64_t count_;
  std::vector<Axis> axes_;
  std::mutex mutex_;
};

/// The codes of values divided by their scales.
class RankOneCodes : public Source {
 public:
  RankOneCodes(std::shared_ptr<Measured> measured, std::vector<float> map,
               const BlockLayout& layout, StateReport* report)
      : measured_(std::move(measured)), rule_(std::move(map)), layout_(layout), errors_(report) {}

  Status do_read(uint64_t first, uint64_t count, void* out) override {
    RETURN_IF_ERROR(measured_->measure());
    const uint64_t per = layout_.per_element();
    auto* to = static_cast<uint8_t*>(out);
    while (count > 0) {
      const uint64_t n = std::min<uint64_t>(count, 1u << 14), begin = first * per;
      const uint64_t end = std::min((first + n) * per, layout_.count);
      const ScratchBuffer memory(x_, back_);
      x_.resize(end > begin ? end - begin : 0), back_.resize(x_.size());
      if (!x_.empty()) RETURN_IF_ERROR(measured_->values().read(begin, x_.size(), x_.data()));
      std::memset(to, 0, n);
      for (uint64_t i = 0; i < n * per; ++i) {
        uint16_t code = rule_.nearest(0.0f);  // what lpmm fills its last pack with
        if (i < x_.size()) {
          const float scale = measured_->scale(begin + i);
          code = scale > 0 ? rule_.nearest(x_[i] / scale)
                           : static_cast<uint16_t>(rule_.table().size() - 1);
          back_[i] = rule_.table()[code] * scale;
        }
        to[i / per] |=
            static_cast<uint8_t>(code << (i % per * static_cast<uint64_t>(layout_.bits)));
      }
      errors_.add(x_.data(), back_.data(), x_.size());
      first += n, count -= n, to += n;
    }
    return fine();
  }

 private:
  const std::shared_ptr<Measured> measured_;
  const TableRule rule_;
  const BlockLayout layout_;
  ErrorSum errors_;
  std::vector<float> x_, back_;
};

}  // namespace

std::shared_ptr<Floats> rank_one_floats(std::vector<float> map, const BlockLayout& layout,
                                        std::shared_ptr<Source> codes, const Shape& shape,
                                        std::vector<CrossTileScale> scales) {
  return std::make_shared<RankOne>(std::move(map), layout, std::move(codes), shape,
                                   std::move(scales));
}

std::pair<std::shared_ptr<Source>, std::vector<std::shared_ptr<Source>>> rank_one_codes(
    std::shared_ptr<Floats> values, const Shape& shape, std::vector<float> map,
    const BlockLayout& layout, StateReport* report) {
  const auto measured = std::make_shared<Measured>(std::move(values), shape);
  std::vector<std::shared_ptr<Source>> scales;
  for (size_t d = 0; d < shape.size(); ++d) {
    scales.push_back(source_by([measured, d](uint64_t first, uint64_t count, void* out) -> Status {
      RETURN_IF_ERROR(measured->measure());
      std::memcpy(out, measured->absmax[d].data() + first, count * sizeof(float));
      return fine();
    }));
  }
  return {std::make_shared<RankOneCodes>(measured, std::move(map), layout, report),
          std::move(scales)};
}

}  // namespace lowbit::ckpt
