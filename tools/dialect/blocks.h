// Codes over the flattened tensor, as peers keep them: blocks that know nothing of rows, several
// ways to share bytes, padding that is stored. A peer gives the rule of one block.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "dialect/coding.h"

namespace lowbit::ckpt {

/// One block of values and its codes. Scales are kNumbers float32 numbers at most.
class BlockRule {
 public:
  static constexpr int kNumbers = 2;
  using Scale = std::array<float, kNumbers>;
  virtual ~BlockRule() = default;
  virtual void decode(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const = 0;
  /// The scale that `encode` finds; `spare` has room for the codes of a rule that needs them for it.
  virtual Scale scale(const float* x, int64_t n, uint16_t* spare) const {
    return encode(x, n, spare);
  }
  /// The scale as it will be read back.
  virtual Scale encode(const float* x, int64_t n, uint16_t* codes) const = 0;
};

/// A value for each code, times the block's scale. A code is that of the nearest value, the peer's
/// way.
class TableRule : public BlockRule {
 public:
  enum class Tie : uint8_t { kLower, kAwayFromZeroSign };
  explicit TableRule(std::vector<float> table, Tie tie = Tie::kLower);
  void decode(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override;
  Scale scale(const float* x, int64_t n, uint16_t* spare) const override;
  Scale encode(const float* x, int64_t n, uint16_t* codes) const override;
  uint16_t nearest(float z) const;
  const std::vector<float>& table() const { return table_; }

 private:
  const std::vector<float> table_;
  const Tie tie_;
};

/// How codes lie in memory.
struct BlockLayout {
  uint64_t count = 0;       // values
  int64_t block = 256;      // values of one scale
  int bits = 8;             // 1, 2, 4: shared bytes; 8; 16: two bytes, little-endian
  bool high_first = false;  // the first of the codes of a byte is the highest
  uint64_t coded = 0;       // codes that are stored for blocks, `count` and zeros behind them
  uint64_t stored = 0;      // all codes that are stored; those from `coded` on mean nothing
  uint16_t filler = 0;      // what they are
  int bias = 0;             // of the stored bytes over the codes: int8 codes count from -127

  uint64_t per_element() const { return bits < 8 ? 8 / static_cast<uint64_t>(bits) : 1; }
  uint64_t blocks() const {
    const auto b = static_cast<uint64_t>(block);
    return (count + b - 1) / b;
  }
  uint64_t elements() const { return (stored + per_element() - 1) / per_element(); }
};

/// Reads codes one by one, whatever they share bytes with.
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

/// Values of codes; scales[k] gives number k of each block.
std::shared_ptr<Floats> block_floats(std::shared_ptr<const BlockRule> rule,
                                     const BlockLayout& layout, std::shared_ptr<Source> codes,
                                     std::vector<std::shared_ptr<Floats>> scales);
/// Codes of values by the rule, in elements of one byte, or two where codes have 16 bits. `report`
/// gets the errors.
std::shared_ptr<Source> block_codes(std::shared_ptr<const BlockRule> rule,
                                    const BlockLayout& layout, std::shared_ptr<Floats> values,
                                    StateReport* report);
/// Number k of each block's scale. `values` must be fit for several threads (`locked`).
std::shared_ptr<Floats> block_scales(std::shared_ptr<const BlockRule> rule,
                                     const BlockLayout& layout, std::shared_ptr<Floats> values,
                                     int k);

}  // namespace lowbit::ckpt
