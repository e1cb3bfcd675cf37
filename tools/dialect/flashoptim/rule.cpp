#include <cmath>

#include "core/half.h"
#include "core/state/companded8.h"
#include "dialect/flashoptim/flashoptim.h"

namespace lowbit::ckpt {
namespace {

class CompandedRule : public BlockRule {
 public:
  explicit CompandedRule(bool is_signed) : signed_(is_signed) {}
  void dequantize(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override {
    for (int64_t i = 0; i < n; ++i) {
      if (signed_) {
        out[i] = Companded8::dequantize(codes[i]) * scale[0];
      } else {
        const float u = Companded8Unsigned::dequantize(codes[i]) * scale[0];
        out[i] = u * u;
      }
    }
  }
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override {
    float limit = 1e-12f;
    const auto bent = [&](float v) { return signed_ ? v : std::sqrt(v > 0 ? v : 0.0f); };
    for (int64_t i = 0; i < n; ++i) {
      const float a = std::fabs(bent(x[i]));
      limit = a > limit ? a : limit;
    }
    const float top = signed_ ? 127.0f : 255.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float z = bent(x[i]) / limit, t = signed_ ? 2.0f * z / (1.0f + std::fabs(z)) : z;
      const float code = std::floor(t * top + 0.5f);
      // A NaN becomes zero in FlashOptim; here it becomes what shows: the block's scale is NaN.
      const int k = code >= -top && code <= top ? static_cast<int>(code) : 0;
      codes[i] = static_cast<uint16_t>(signed_ ? k + 127 : k);
    }
    bool finite = true;
    for (int64_t i = 0; i < n; ++i) finite = finite && std::isfinite(x[i]);
    return {finite ? half_to_float(half_nearest(limit)) : std::nanf(""), 0};
  }

 private:
  const bool signed_;
};

}  // namespace

const char* versions_of(FlashFiles files) {
  return files == FlashFiles::kOld ? "0.1.3 or before" : "0.1.4";
}

std::shared_ptr<const BlockRule> flash_rule(bool is_signed) {
  return std::make_shared<CompandedRule>(is_signed);
}

BlockLayout flash_layout(uint64_t count, bool is_signed) {
  return {.count = count, .block = kFlashBlock, .bias = is_signed ? -127 : 0};
}

}  // namespace lowbit::ckpt
