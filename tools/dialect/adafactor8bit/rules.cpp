#include "dialect/adafactor8bit/rules.h"

#include <algorithm>
#include <cmath>

#include "dialect/model/formats.h"

namespace lowbit::ckpt {
namespace {

/// Logarithms from 2^-126 on in 255 steps; `step` of a scale is how much one is.
class FixedLogRule : public BlockRule {
 public:
  explicit FixedLogRule(bool divided) : divided_(divided) {}
  void dequantize(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override {
    const float step = divided_ ? scale[0] : scale[0] / 255.0f;
    for (int64_t i = 0; i < n; ++i)
      out[i] = std::exp2(static_cast<float>(codes[i]) * step - 126.0f);
  }
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override {
    float limit = -126;
    for (int64_t i = 0; i < n; ++i) limit = std::max(limit, std::log2(std::max(x[i], 0x1p-126f)));
    const float range = std::max(limit + 126.0f, 1e-12f);
    for (int64_t i = 0; i < n; ++i) {
      const float l = std::log2(std::max(x[i], 0x1p-126f));
      codes[i] = static_cast<uint16_t>(
          std::clamp(std::nearbyint((l + 126.0f) * 255.0f / range), 0.0f, 255.0f));
    }
    return {divided_ ? range / 255.0f : range, 0};
  }

 private:
  const bool divided_;
};

/// From the block's least value that is not zero to its largest; code 0 is zero.
class AdaptiveLogRule : public BlockRule {
 public:
  explicit AdaptiveLogRule(float steps) : steps_(steps) {}
  void dequantize(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override {
    for (int64_t i = 0; i < n; ++i) {
      const auto q = static_cast<float>(codes[i]);
      out[i] = codes[i] == 0 ? 0.0f : std::exp2((q - 1.0f) * scale[0] / steps_ + scale[1]);
    }
  }
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override {
    float low = INFINITY, high = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
      if (!std::isfinite(x[i])) {  // no code is Inf or NaN: the scale is, and all of the block
        std::fill_n(codes, n, uint16_t{1});
        return {NAN, -126.0f};
      }
      if (!(x[i] > 0)) continue;
      const float l = log_of(x[i]);
      low = std::min(low, l), high = std::max(high, l);
    }
    if (!(high >= low)) {  // nothing but zeros: as it writes them
      std::fill_n(codes, n, uint16_t{0});
      return {1.0f, -127.23f};
    }
    low = std::max(low, -126.0f);
    high = std::min(high, 126.0f);
    if (low >= high) low = high - 1.0f;
    const float range = std::max(high - low, 1e-12f);
    for (int64_t i = 0; i < n; ++i) {
      const float q = std::nearbyint((log_of(x[i]) - low) * steps_ / range) + 1.0f;
      codes[i] = static_cast<uint16_t>(x[i] > 0 ? std::clamp(q, 1.0f, steps_ + 1.0f) : 0.0f);
    }
    return {range, low};
  }

 private:
  static float log_of(float x) { return std::log2(std::max(x, 1e-38f)); }
  const float steps_;
};

std::vector<float> even(int codes, float divisor) {
  std::vector<float> table(static_cast<size_t>(codes));
  for (int q = 0; q < codes; ++q)
    table[static_cast<size_t>(q)] = static_cast<float>(q - codes / 2) / divisor;
  return table;
}

/// Nearest, half to even, of values that are evenly spaced.
class EvenRule : public TableRule {
 public:
  EvenRule(int codes, float divisor)
      : TableRule(even(codes, divisor)), half_(static_cast<float>(codes / 2)) {}
  Scale scale(const float* x, int64_t n, uint16_t* spare) const override {
    return {std::max(TableRule::scale(x, n, spare)[0], 1e-12f), 0};
  }
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override {
    const float limit = scale(x, n, codes)[0];
    for (int64_t i = 0; i < n; ++i) {
      const float q = std::clamp(std::nearbyint(half_ * x[i] / limit), -half_, half_ - 1.0f);
      codes[i] = static_cast<uint16_t>(std::isnan(q) ? half_ : q + half_);
    }
    return {limit, 0};
  }

 private:
  const float half_;
};

}  // namespace

const char* versions_of(AdafactorFiles files) {
  constexpr const char* kVersions[] = {"0.1.0 to 0.1.2", "0.1.3 to 0.2.0", "0.2.1 to 0.3.1",
                                       "0.4.0 and later", "0.4.1 and later, 16 bits"};
  return kVersions[static_cast<int>(files)];
}

std::shared_ptr<const BlockRule> second_moment_rule(AdafactorFiles files) {
  switch (files) {
    case AdafactorFiles::kLinear: {
      std::vector<float> table(256);
      for (int q = 0; q < 256; ++q) table[static_cast<size_t>(q)] = static_cast<float>(q) / 255.0f;
      return std::make_shared<TableRule>(std::move(table));
    }
    case AdafactorFiles::kDivided:
    case AdafactorFiles::kFixed:
      return std::make_shared<FixedLogRule>(files == AdafactorFiles::kDivided);
    case AdafactorFiles::kAdaptive8:
      return std::make_shared<AdaptiveLogRule>(254.0f);
    case AdafactorFiles::kAdaptive16:
      break;
  }
  return std::make_shared<AdaptiveLogRule>(65534.0f);
}

int bits_of(AdafactorMomentum kind) {
  return kind == AdafactorMomentum::kUniform8 || kind == AdafactorMomentum::kDynamic8 ? 8 : 4;
}

const char* name_of(AdafactorMomentum kind) {
  constexpr const char* kNames[] = {"int4", "4-bit table", "uf4", "uf8", "d4", "d8"};
  return kNames[static_cast<int>(kind)];
}

std::shared_ptr<const BlockRule> momentum_rule(AdafactorMomentum kind) {
  using enum AdafactorMomentum;
  switch (kind) {
    case kInt4:
      return std::make_shared<EvenRule>(16, 1.0f);
    case kNormal4:
      return std::make_shared<TableRule>(
          std::vector<float>{-1.0f, -0.6961928f, -0.52507306f, -0.3895074f, -0.27408478f,
                             -0.17286907f, -0.07958022f, 0.0f, 0.07958022f, 0.17286907f,
                             0.27408478f, 0.3895074f, 0.52507306f, 0.6961928f, 0.8641379f, 1.0f});
    case kUniform4:
      return std::make_shared<EvenRule>(16, 8.0f);
    case kUniform8:
      return std::make_shared<EvenRule>(256, 128.0f);
    case kDynamic4:
    case kDynamic8:
      break;
  }
  return std::make_shared<TableRule>(codebook_of(kind == kDynamic4 ? "dynamic4" : "dynamic8"),
                                     TableRule::Tie::kAwayFromZeroSign);
}

}  // namespace lowbit::ckpt
