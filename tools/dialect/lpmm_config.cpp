#include "dialect/lpmm_config.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "catalog.h"
#include "cpu/step.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// A node of yacs' configuration trees, of which lpmm's qconfig is one.
Value node() { return {.kind = Value::Kind::kDict, .text = Value::kConfiguration}; }

Value only(const char* name) {
  Value v = node();
  v.set("DEFAULT", Value::words(name));
  v.set("DEFAULT_ONLY", Value::boolean(true));
  return v;
}

Value quantizer(bool enable, int64_t bits, const char* scale, const char* type, const char* round,
                int64_t group, bool is_signed) {
  Value v = node();
  v.set("ENABLE", Value::boolean(enable));
  v.set("THRESHOLD", Value::number(4096));
  v.set("EXCLUDE_SUFFIX", Value::list({Value::words("")}));
  v.set("EXCLUDE_REGEX", Value::list({Value::words("")}));
  v.set("BITS", Value::number(bits));
  v.set("SCALE_TYPE", only(scale));
  v.set("QUANT_TYPE", only(type));
  v.set("ROUND_TYPE", Value::words(round));
  v.set("GROUP_SIZE", Value::number(group));
  v.set("SIGNED", Value::boolean(is_signed));
  return v;
}

/// Largest magnitudes along each dimension, found once for the sources that need them.
class Measured {
 public:
  Measured(std::shared_ptr<Floats> values, Shape shape)
      : values_(std::move(values)), shape_(std::move(shape)) {}

  Status measure() {
    const std::lock_guard lock(mutex_);
    if (!most.empty()) return fine();
    std::vector<std::vector<float>> found(shape_.size());
    for (size_t d = 0; d < shape_.size(); ++d)
      found[d].assign(static_cast<size_t>(shape_[d]), 0.0f);
    std::vector<float> x;
    const uint64_t n = volume(shape_);
    for (uint64_t at = 0; at < n;) {
      x.resize(std::min<uint64_t>(n - at, 1u << 15));
      LB_CHECK(values_->read(at, x.size(), x.data()));
      for (size_t i = 0; i < x.size(); ++i) {
        for (size_t d = 0; d < shape_.size(); ++d) {
          float& m = found[d][place(d, at + i)];
          m = std::max(m, std::fabs(x[i]));
        }
      }
      at += x.size();
    }
    most = std::move(found);
    return fine();
  }
  size_t place(size_t d, uint64_t element) const {
    uint64_t stride = 1;
    for (size_t k = d + 1; k < shape_.size(); ++k) stride *= static_cast<uint64_t>(shape_[k]);
    return element / stride % static_cast<uint64_t>(shape_[d]);
  }
  float scale(uint64_t element) const {
    float least = most[0][place(0, element)];
    for (size_t d = 1; d < shape_.size(); ++d) least = std::min(least, most[d][place(d, element)]);
    return least;
  }
  Floats& values() { return *values_; }

  std::vector<std::vector<float>> most;

 private:
  const std::shared_ptr<Floats> values_;
  const Shape shape_;
  std::mutex mutex_;
};

class MaximaSource : public Source {
 public:
  MaximaSource(std::shared_ptr<Measured> measured, size_t dim)
      : measured_(std::move(measured)), dim_(dim) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    LB_CHECK(measured_->measure());
    std::memcpy(out, measured_->most[dim_].data() + first, count * sizeof(float));
    return fine();
  }

 private:
  const std::shared_ptr<Measured> measured_;
  const size_t dim_;
};

/// Values over their scales, for a rule of blocks of one value.
class RankOneCodes : public Source {
 public:
  RankOneCodes(std::shared_ptr<Measured> measured, std::vector<float> map,
               const BlockLayout& layout, StateReport* report)
      : measured_(std::move(measured)), rule_(std::move(map)), layout_(layout), errors_(report) {}

  Status read(uint64_t first, uint64_t count, void* out) override {
    LB_CHECK(measured_->measure());
    const uint64_t per = layout_.per_element();
    auto* to = static_cast<uint8_t*>(out);
    while (count > 0) {
      const uint64_t n = std::min<uint64_t>(count, 1u << 14), begin = first * per;
      const uint64_t end = std::min((first + n) * per, layout_.count);
      x_.resize(end > begin ? end - begin : 0), back_.resize(x_.size());
      if (!x_.empty()) LB_CHECK(measured_->values().read(begin, x_.size(), x_.data()));
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

Result<LpmmConfig> LpmmConfig::of(const Wanted& wanted) {
  if (wanted.block != 0 && wanted.block != 128)
    return Error{Exit::kUsage,
                 "lpmm's groups are written with 128 values, not " + std::to_string(wanted.block)};
  const std::string& f = wanted.state_format;
  if (f.empty() || f == "4bit") return LpmmConfig{};
  if (f == "4bit-rank1") return LpmmConfig{true, true};
  if (f == "float32") return LpmmConfig{false, false};
  return Error{Exit::kUsage, "lpmm's states are not written as " + printable(f) +
                                 "; take 4bit (groups of 128, its default), 4bit-rank1 or float32"};
}

Value LpmmConfig::value() const {
  Value quant = node();
  quant.set("INIT_STATES", Value::list({Value::words("param")}));
  quant.set("P", quantizer(false, 8, "group", "linear", "sr", 64, true));
  Value gradients = node();
  gradients.set("ENABLE", Value::boolean(false));
  gradients.set("THRESHOLD", Value::number(4096));
  quant.set("G", std::move(gradients));
  quant.set("M", quantizer(quantized, kBits, "group", "nonlinear", "real-nearest", 128, true));
  quant.set("SQM", quantizer(quantized, kBits, rank1 ? "rank1" : "group", "power-1", "real-nearest",
                             128, false));
  Value debug = node();
  for (const char* name :
       {"TRUNCATED_RATE_STAT_ITER", "ROW_ABSMAX_STAT_ITER", "ROW_ABSMAX_STAT_EPOCH"})
    debug.set(name, Value::boolean(false));
  quant.set("DEBUG", std::move(debug));
  Value root = node();
  root.set("BASE", Value::list({Value::words("")}));
  root.set("QUANT", std::move(quant));
  root.set("TRAIN", node());
  root.set("OUTPUT", Value::words("."));
  root.set("TAG", Value::words(""));
  root.set("LOCAL_RANK", Value::number(0));
  return root;
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

std::pair<std::shared_ptr<Source>, std::vector<std::shared_ptr<Source>>> rank_one_codes(
    std::shared_ptr<Floats> values, const Shape& shape, std::vector<float> map,
    const BlockLayout& layout, StateReport* report) {
  const auto measured = std::make_shared<Measured>(std::move(values), shape);
  std::vector<std::shared_ptr<Source>> most;
  for (size_t d = 0; d < shape.size(); ++d)
    most.push_back(std::make_shared<MaximaSource>(measured, d));
  return {std::make_shared<RankOneCodes>(measured, std::move(map), layout, report),
          std::move(most)};
}

}  // namespace lowbit::ckpt
