#include "dialect/requantize/nearest.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/state/float8.h"
#include "dialect/model/formats.h"
#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {
namespace {

constexpr int kDropped = 16;  // low bits of a float that the table of starts leaves out

/// Bits of a float in the order of the floats.
uint32_t ordered(float z) {
  const auto bits = std::bit_cast<uint32_t>(z);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
float from_ordered(uint32_t key) {
  return std::bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

class Float8Rule : public BlockRule {
 public:
  Scale scale(const float* x, int64_t n, uint16_t*) const override {
    const float limit = largest(x, n);
    return {(limit < 1e-12f ? 1e-12f : limit) / 448.0f, 0};
  }
  void dequantize(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override {
    for (int64_t i = 0; i < n; ++i) out[i] = Float8E4M3::dequantize(codes[i]) * scale[0];
  }
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override {
    const Scale scale = this->scale(x, n, codes);
    for (int64_t i = 0; i < n; ++i) {
      const float z = x[i] / scale[0];
      const uint32_t code = Float8E4M3::quantize(z);
      // torch keeps the sign of a zero.
      codes[i] = static_cast<uint16_t>(code | (code == 0 && std::signbit(z) ? 0x80u : 0));
      if (std::isnan(z)) codes[i] = 0x7f;
    }
    return scale;
  }
};

}  // namespace

NearestRule::NearestRule(std::vector<float> table, std::vector<float> boundaries, float minimum)
    : TableRule(std::move(table)), boundaries_(std::move(boundaries)), min_(minimum) {
  start_.resize(size_t{1} << (32 - kDropped));
  for (size_t i = 0; i < start_.size(); ++i) {
    const float z = from_ordered(static_cast<uint32_t>(i) << kDropped);
    const auto code = std::isnan(z) && !std::signbit(z)
                          ? boundaries_.end()  // beyond infinity, and NaN is no z
                      : std::isnan(z) ? boundaries_.begin()
                                      : std::upper_bound(boundaries_.begin(), boundaries_.end(), z);
    start_[i] = static_cast<uint8_t>(code - boundaries_.begin());
    const float last = from_ordered(static_cast<uint32_t>(i) << kDropped | ((1u << kDropped) - 1));
    if (std::isnan(z) || std::isnan(last)) continue;
    const auto end = std::upper_bound(boundaries_.begin(), boundaries_.end(), last);
    steps_ = std::max(steps_, static_cast<int>(end - code));
  }
  // No z is beyond these.
  boundaries_.resize(boundaries_.size() + static_cast<size_t>(steps_) + 1,
                     std::numeric_limits<float>::quiet_NaN());
}

NearestRule::Scale NearestRule::scale(const float* x, int64_t n, uint16_t*) const {
  const float limit = largest(x, n);
  return {limit < min_ ? min_ : limit, 0};
}

NearestRule::Scale NearestRule::quantize(const float* x, int64_t n, uint16_t* codes) const {
  const Scale scale = this->scale(x, n, codes);
  // Without branches: the processor could not predict them.
  for (int64_t i = 0; i < n; ++i) {
    const float z = x[i] / scale[0];
    size_t code = start_[ordered(z) >> kDropped];
    for (int s = 0; s < steps_; ++s) code += z >= boundaries_[code];
    // Only a scale of zero, and infinities over one, make a NaN of a number: code 0, as for the
    // peers.
    codes[i] = static_cast<uint16_t>(std::isnan(z) ? 0 : code);
  }
  return scale;
}

std::shared_ptr<const BlockRule> bitsandbytes_rule(std::vector<float> table) {
  std::vector<float> boundaries;
  for (size_t c = 0; c + 1 < table.size(); ++c) {
    const float middle = (table[c] + table[c + 1]) * 0.5f;
    const bool up = (c + 1) % 2 == 0;
    boundaries.push_back(up ? middle
                            : std::nextafter(middle, std::numeric_limits<float>::infinity()));
  }
  return std::make_shared<NearestRule>(std::move(table), std::move(boundaries), 0.0f);
}

std::shared_ptr<const BlockRule> torchao_rule(std::vector<float> table) {
  std::vector<float> boundaries;
  for (size_t c = 0; c + 1 < table.size(); ++c) {
    const float low = table[c], high = table[c + 1], half = (high - low) * 0.5f;
    // z - low is rounded, so this searches for the least z at which it is half the way.
    uint32_t below = ordered(low), above = ordered(high);
    while (above - below > 1) {
      const uint32_t middle = below + (above - below) / 2;
      (from_ordered(middle) - low >= half ? above : below) = middle;
    }
    boundaries.push_back(from_ordered(above));
  }
  return std::make_shared<NearestRule>(std::move(table), std::move(boundaries), 1e-12f);
}

std::shared_ptr<const BlockRule> torchao_float8_rule() { return std::make_shared<Float8Rule>(); }

std::string format_of_table(const std::vector<float>& table, bool is_signed) {
  const char* name = table.size() == 256  ? (is_signed ? "dynamic8" : "dynamic8_unsigned")
                     : table.size() == 16 ? (is_signed ? "dynamic4" : "power1_4_unsigned")
                                          : nullptr;
  return name != nullptr && codebook_of(name) == table ? name : "";
}

std::optional<Codes> codes_of_rows(const Shape& shape, const std::string& format, int bits,
                                   int64_t block, std::shared_ptr<Source> codes,
                                   std::shared_ptr<Source> scales) {
  const auto [rows, cols] = matrix_of(shape);
  if (rows != 1 && cols % block != 0) return std::nullopt;
  return Codes{format, bits, rows, cols, block, std::move(codes), std::move(scales)};
}

std::optional<Codes> flat_codes(const State& state, const std::string& format, int64_t block) {
  if (!state.codes || state.codes->format != format) return std::nullopt;
  const Codes& codes = *state.codes;
  if (block != 0 && codes.block != block) return std::nullopt;
  if (codes.rows != 1 && codes.cols % codes.block != 0) return std::nullopt;
  Codes out = codes;
  out.rows = 1, out.cols = codes.rows * codes.cols;
  return out;
}

Status check_shape(const Param& param, const State& state, DialectReport& report) {
  if (param.known_shape) return fine();
  if (state.shape.empty())
    return bad(shown(param) + ": the checkpoint does not tell its shape; give the one with its " +
               "weights as --model PATH");
  report.warn(
      "the checkpoint does not tell the shapes of its parameters: states are written as matrices, "
      "which is wrong for parameters of more dimensions; --model PATH with the weights tells them");
  return fine();
}

}  // namespace lowbit::ckpt
