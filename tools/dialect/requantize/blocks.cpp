#include "dialect/requantize/blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dialect/numbers/floats.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kBlocksPiece = 1u << 15;  // values at a time

/// Blocks that are read together: as many as make a piece, at least one.
uint64_t piece_of(const BlockLayout& layout) {
  const auto block = static_cast<uint64_t>(layout.block);
  return std::max<uint64_t>(1, kBlocksPiece / block) * block;
}

class Dequantized : public Floats {
 public:
  Dequantized(std::shared_ptr<const BlockRule> rule, const BlockLayout& layout,
              std::shared_ptr<Source> codes, std::vector<std::shared_ptr<Floats>> scales)
      : rule_(std::move(rule)),
        layout_(layout),
        codes_(std::move(codes), layout),
        scales_(std::move(scales)),
        numbers_(scales_.size()) {}

  Status do_read(uint64_t first, uint64_t count, float* out) override {
    const auto block = static_cast<uint64_t>(layout_.block);
    while (count > 0) {
      const ScratchBuffer memory(buffer_);
      const uint64_t begin = first / block, n = std::min(count, piece_of(layout_) - first % block);
      const uint64_t end = (first + n + block - 1) / block;
      for (size_t k = 0; k < scales_.size(); ++k) {
        numbers_[k].resize(end - begin);
        RETURN_IF_ERROR(scales_[k]->read(begin, end - begin, numbers_[k].data()));
      }
      buffer_.resize(n);
      RETURN_IF_ERROR(codes_.read(first, n, buffer_.data()));
      for (uint64_t at = first; at < first + n;) {
        const uint64_t stop = std::min((at / block + 1) * block, first + n);
        BlockRule::Scale scale{};
        for (size_t k = 0; k < scales_.size(); ++k) scale[k] = numbers_[k][at / block - begin];
        rule_->dequantize(buffer_.data() + (at - first), scale, static_cast<int64_t>(stop - at),
                          out + (at - first));
        at = stop;
      }
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  const std::shared_ptr<const BlockRule> rule_;
  const BlockLayout layout_;
  CodeReader codes_;
  const std::vector<std::shared_ptr<Floats>> scales_;
  std::vector<std::vector<float>> numbers_;
  std::vector<uint16_t> buffer_;
};

/// Whole blocks of values, with the zeros behind them.
class BlockReader {
 public:
  BlockReader(const BlockLayout& layout, std::shared_ptr<Floats> values)
      : layout_(layout), values_(std::move(values)) {}
  /// Blocks [begin, end); values behind the last are zero, and `length` says how many of a block
  /// are coded.
  Status read(uint64_t begin, uint64_t end) {
    const auto block = static_cast<uint64_t>(layout_.block);
    x.assign((end - begin) * block, 0.0f);
    const uint64_t stop = std::min(end * block, layout_.count);
    return stop > begin * block ? values_->read(begin * block, stop - begin * block, x.data())
                                : fine();
  }
  int64_t length(uint64_t b) const {
    const auto block = static_cast<uint64_t>(layout_.block);
    return static_cast<int64_t>(
        std::min(block, std::max(layout_.coded, layout_.count) - b * block));
  }
  std::vector<float> x;

 private:
  const BlockLayout layout_;
  const std::shared_ptr<Floats> values_;
};

class CodesOf : public Source {
 public:
  CodesOf(std::shared_ptr<const BlockRule> rule, const BlockLayout& layout,
          std::shared_ptr<Floats> values, StateReport* report)
      : rule_(std::move(rule)),
        layout_(layout),
        blocks_(layout, std::move(values)),
        errors_(report) {
    if (report != nullptr) report->exact = false;
  }

  Status do_read(uint64_t first, uint64_t count, void* out) override {
    const uint64_t per = layout_.per_element();
    const ScratchBuffer memory(codes_, own_, back_, blocks_.x);
    auto* to = static_cast<uint8_t*>(out);
    while (count > 0) {
      const uint64_t n = std::min(count, std::max<uint64_t>(1, piece_of(layout_) / per));
      codes_.assign(n * per, layout_.filler);
      RETURN_IF_ERROR(quantize(first * per, n * per));
      pack(n, to);
      first += n, count -= n, to += n * (layout_.bits == 16 ? 2 : 1);
    }
    return fine();
  }

 private:
  Status quantize(uint64_t first, uint64_t count) {
    const uint64_t coded = std::max(layout_.coded, layout_.count);
    const uint64_t end = std::min(first + count, coded);
    if (first >= end) return fine();
    const auto block = static_cast<uint64_t>(layout_.block);
    const uint64_t begin = first / block, stop = (end + block - 1) / block;
    RETURN_IF_ERROR(blocks_.read(begin, stop));
    own_.resize(block), back_.resize(block);
    for (uint64_t b = begin; b < stop; ++b) {
      const float* x = blocks_.x.data() + (b - begin) * block;
      const int64_t n = blocks_.length(b);
      const BlockRule::Scale scale = rule_->quantize(x, n, own_.data());
      const uint64_t from = std::max(first, b * block);
      const uint64_t to = std::min(end, b * block + static_cast<uint64_t>(n));
      std::copy(own_.data() + (from - b * block), own_.data() + (to - b * block),
                codes_.data() + (from - first));
      const uint64_t real = std::min(to, layout_.count);
      if (errors_.wanted() && real > from) {
        rule_->dequantize(own_.data(), scale, n, back_.data());
        errors_.add(x + (from - b * block), back_.data() + (from - b * block), real - from);
      }
    }
    return fine();
  }
  void pack(uint64_t n, uint8_t* to) const {
    const uint64_t per = layout_.per_element();
    for (uint64_t i = 0; i < n; ++i) {
      if (layout_.bits == 16) {
        std::memcpy(to + 2 * i, &codes_[i], 2);
        continue;
      }
      unsigned byte = per == 1 ? static_cast<unsigned>(codes_[i] + layout_.bias) : 0;
      for (uint64_t e = 0; per > 1 && e < per; ++e)
        byte |= static_cast<unsigned>(codes_[i * per + e]) << layout_.shift(e);
      to[i] = static_cast<uint8_t>(byte);
    }
  }

  const std::shared_ptr<const BlockRule> rule_;
  const BlockLayout layout_;
  BlockReader blocks_;
  ErrorSum errors_;
  std::vector<uint16_t> codes_, own_;
  std::vector<float> back_;
};

class ScalesOf : public Floats {
 public:
  ScalesOf(std::shared_ptr<const BlockRule> rule, const BlockLayout& layout,
           std::shared_ptr<Floats> values, int k)
      : rule_(std::move(rule)),
        layout_(layout),
        blocks_(layout, std::move(values)),
        k_(static_cast<size_t>(k)) {}
  Status do_read(uint64_t first, uint64_t count, float* out) override {
    const auto block = static_cast<uint64_t>(layout_.block);
    const uint64_t at_once = piece_of(layout_) / block;
    const ScratchBuffer memory(codes_, blocks_.x);
    codes_.resize(block);
    while (count > 0) {
      const uint64_t n = std::min(count, at_once);
      RETURN_IF_ERROR(blocks_.read(first, first + n));
      for (uint64_t b = 0; b < n; ++b)
        out[b] = rule_->scale(blocks_.x.data() + b * block, blocks_.length(first + b),
                              codes_.data())[k_];
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  const std::shared_ptr<const BlockRule> rule_;
  const BlockLayout layout_;
  BlockReader blocks_;
  const size_t k_;
  std::vector<uint16_t> codes_;
};

}  // namespace

float largest(const float* x, int64_t n) {
  float limit = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    limit = a > limit ? a : limit;
  }
  // A NaN is not larger than anything, but makes the peers' scales NaN.
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];
  }
  return limit;
}

TableRule::TableRule(std::vector<float> table, Tie tie) : table_(std::move(table)), tie_(tie) {}

void TableRule::dequantize(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const {
  const auto last = static_cast<uint16_t>(table_.size() - 1);
  for (int64_t i = 0; i < n; ++i) out[i] = table_[std::min(codes[i], last)] * scale[0];
}

uint16_t TableRule::nearest(float z) const {
  // The first entry that is not below z.
  const auto above = std::lower_bound(table_.begin(), table_.end(), z);
  const auto last = static_cast<int64_t>(table_.size()) - 1;
  int64_t code = std::min(above - table_.begin(), last);
  if (code > 0) {
    const float low = table_[static_cast<size_t>(code - 1)],
                high = table_[static_cast<size_t>(code)];
    if (tie_ == Tie::kLower ? !((low + high) / 2 < z) : z - low < high - z) --code;
  }
  if (tie_ == Tie::kAwayFromZeroSign && z != 0) {
    const float value = table_[static_cast<size_t>(code)];
    if (z > 0 && value <= 0 && code < last) ++code;
    if (z < 0 && value >= 0 && code > 0) --code;
  }
  return static_cast<uint16_t>(code);
}

TableRule::Scale TableRule::scale(const float* x, int64_t n, uint16_t*) const {
  const float limit = largest(x, n);
  return {tie_ == Tie::kLower ? limit : std::max(limit, 1e-12f), 0};
}

TableRule::Scale TableRule::quantize(const float* x, int64_t n, uint16_t* codes) const {
  const Scale scale = this->scale(x, n, codes);
  for (int64_t i = 0; i < n; ++i)
    codes[i] = scale[0] > 0 ? nearest(x[i] / scale[0]) : static_cast<uint16_t>(table_.size() - 1);
  return scale;
}

Status CodeReader::read(uint64_t first, uint64_t count, uint16_t* out) {
  const uint64_t per = layout_.per_element(), width = layout_.bits == 16 ? 2 : 1;
  const uint64_t begin = first / per, end = (first + count + per - 1) / per;
  const ScratchBuffer memory(bytes_);
  bytes_.resize((end - begin) * width);
  RETURN_IF_ERROR(source_->read(begin, end - begin, bytes_.data()));
  const auto mask = static_cast<uint16_t>(layout_.bits == 16 ? 0xffff : (1 << layout_.bits) - 1);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t element = (first + i) / per - begin, e = (first + i) % per;
    if (layout_.bits == 16) {
      std::memcpy(out + i, bytes_.data() + 2 * element, 2);
    } else {
      const auto byte = static_cast<uint8_t>(bytes_[element]);
      out[i] = per == 1 ? static_cast<uint8_t>(byte - layout_.bias)
                        : static_cast<uint16_t>(byte >> layout_.shift(e) & mask);
    }
  }
  return fine();
}

std::shared_ptr<Floats> block_floats(std::shared_ptr<const BlockRule> rule,
                                     const BlockLayout& layout, std::shared_ptr<Source> codes,
                                     std::vector<std::shared_ptr<Floats>> scales) {
  return std::make_shared<Dequantized>(std::move(rule), layout, std::move(codes),
                                       std::move(scales));
}

std::shared_ptr<Source> block_codes(std::shared_ptr<const BlockRule> rule,
                                    const BlockLayout& layout, std::shared_ptr<Floats> values,
                                    StateReport* report) {
  return std::make_shared<CodesOf>(std::move(rule), layout, std::move(values), report);
}

std::shared_ptr<Floats> block_scales(std::shared_ptr<const BlockRule> rule,
                                     const BlockLayout& layout, std::shared_ptr<Floats> values,
                                     int k) {
  return std::make_shared<ScalesOf>(std::move(rule), layout, std::move(values), k);
}

}  // namespace lowbit::ckpt
