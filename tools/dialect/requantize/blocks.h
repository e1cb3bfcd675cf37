// Quantization in blocks of the flattened tensor, as other libraries do it: blocks cross rows,
// codes share bytes in several ways, padding is stored. A library gives the rule of one block.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "dialect/model/model.h"
#include "dialect/numbers/report.h"

namespace lowbit::ckpt {

/// How one block of values is quantized. A scale has at most kNumbers float32 numbers.
class BlockRule {
 public:
  static constexpr int kNumbers = 2;
  using Scale = std::array<float, kNumbers>;
  virtual ~BlockRule() = default;
  virtual void dequantize(const uint16_t* codes, const Scale& scale, int64_t n,
                          float* out) const = 0;
  /// The scale that `quantize` returns. `spare` has room for the codes, if the rule needs them.
  virtual Scale scale(const float* x, int64_t n, uint16_t* spare) const {
    return quantize(x, n, spare);
  }
  /// Quantizes a block, and returns the scale as it will be read back.
  virtual Scale quantize(const float* x, int64_t n, uint16_t* codes) const = 0;
};

/// The absmax of values; NaN if one of them is, so that a block with it is NaN and can be seen.
float largest(const float* x, int64_t n);

/// A codebook: the value of each code, times the scale of the block. Quantizing takes the nearest
/// value; libraries break ties differently.
class TableRule : public BlockRule {
 public:
  enum class Tie : uint8_t { kLower, kAwayFromZeroSign };
  explicit TableRule(std::vector<float> table, Tie tie = Tie::kLower);
  void dequantize(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override;
  Scale scale(const float* x, int64_t n, uint16_t* spare) const override;
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override;
  uint16_t nearest(float z) const;
  const std::vector<float>& table() const { return table_; }

 private:
  const std::vector<float> table_;
  const Tie tie_;
};

/// The layout of codes in memory.
struct BlockLayout {
  uint64_t count = 0;       // values
  int64_t block = 256;      // values of one scale
  int bits = 8;             // 1, 2, 4: shared bytes; 8; 16: two bytes, little-endian
  bool high_first = false;  // the first of the codes of a byte is the highest
  uint64_t coded = 0;       // codes that are stored for blocks, `count` and zeros behind them; 0:
                            // none behind them
  uint64_t stored = 0;      // all codes that are stored; those from `coded` on mean nothing
  uint16_t filler = 0;      // what they are
  int bias = 0;             // of the stored bytes over the codes: int8 codes count from -127

  uint64_t per_element() const { return bits < 8 ? 8 / static_cast<uint64_t>(bits) : 1; }
  /// Where in its byte code e of one lies.
  uint64_t shift(uint64_t e) const {
    return static_cast<uint64_t>(bits) * (high_first ? per_element() - 1 - e : e);
  }
  uint64_t blocks() const {
    const auto b = static_cast<uint64_t>(block);
    return (count + b - 1) / b;
  }
  uint64_t elements() const { return (stored + per_element() - 1) / per_element(); }
};

/// Reads single codes out of shared bytes.
class CodeReader {
 public:
  CodeReader(std::shared_ptr<Source> source, const BlockLayout& layout)
      : source_(std::move(source)), layout_(layout) {}
  Status read(uint64_t first, uint64_t count, uint16_t* out);

 private:
  const std::shared_ptr<Source> source_;
  const BlockLayout layout_;
  std::vector<char> bytes_;
};

/// The values of codes. scales[k] has number k of each block's scale.
std::shared_ptr<Floats> block_floats(std::shared_ptr<const BlockRule> rule,
                                     const BlockLayout& layout, std::shared_ptr<Source> codes,
                                     std::vector<std::shared_ptr<Floats>> scales);
/// The codes of values, in elements of one byte, or of two for 16-bit codes. `report` receives the
/// errors.
std::shared_ptr<Source> block_codes(std::shared_ptr<const BlockRule> rule,
                                    const BlockLayout& layout, std::shared_ptr<Floats> values,
                                    StateReport* report);
/// Number k of each block's scale. `values` must be thread-safe (`locked`).
std::shared_ptr<Floats> block_scales(std::shared_ptr<const BlockRule> rule,
                                     const BlockLayout& layout, std::shared_ptr<Floats> values,
                                     int k);

}  // namespace lowbit::ckpt
