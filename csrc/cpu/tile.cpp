#include "cpu/tile.h"

#include <algorithm>
#include <cstring>

#include "catalog/catalog.h"

namespace lowbit::cpu {

Tile::Tile(const Job& job, const Kernels& kernel) : job_(job), kernel_(kernel) {
  const RuleInfo rule = rule_info(job.rule);
  const ParamInfo param = param_info(job.param_format);
  slots_ = rule.slots;
  factors_count_ = rule.factors;
  param_bytes_ = param.bytes;
  compensation_bytes_ = param.compensation_bytes;
  grad_bytes_ = grad_bytes(job.grad_format);
  random_ = job.write_param && param.random;
  lead_ = job.lead();
  offset_ = job.cut == kCutAll && job.global_cols > 0 ? job.first % job.global_cols : 0;
  rows_inside_ = job.inner_cols > 0 ? job.cols / job.inner_cols : 1;
  for (int k = 0; k < kMaxSlots; ++k) states_[k] = s_[k];
  for (int k = 0; k < 2 * kMaxFactors; ++k) factors_[k] = f_[k];
  for (int k = 0; k < slots_; ++k) {
    const StateInfo info = state_info(job.state[k].format);
    cursor_[k] = {info.bits, info.scale_bytes, nullptr, nullptr};
    finds_absmax_ |= job.state[k].kind == kBlock && factors_count_ == 0;
  }
}

void Tile::absmax_of(const uint32_t* rows, const uint32_t* cols, int stride, uint32_t* out) const {
  const uint32_t of_row = rows != nullptr ? rows[row * stride] : ~0u;
  const int before = col < 0 ? static_cast<int>(-col) : 0;
  for (int i = 0; i < before; ++i) out[i] = 0;
  if (cols == nullptr) {
    for (int i = before; i < n; ++i) out[i] = of_row;
  } else {
    for (int i = before; i < n; ++i) out[i] = cols[col + i] < of_row ? cols[col + i] : of_row;
  }
}

void Tile::blank(float* x) const {
  for (int i = 0; i < begin; ++i) x[i] = 0.0f;
  for (int i = end; i < n; ++i) x[i] = 0.0f;
}

const char* Tile::codes_in(const Cursor& c) {
  if (col >= 0) return c.values;
  const int64_t before = code_bytes(-col, c.bits), bytes = code_bytes(n, c.bits);
  std::memset(codes_, 0, static_cast<size_t>(before));
  std::memcpy(codes_ + before, c.values + before, static_cast<size_t>(bytes - before));
  return codes_;
}

void Tile::codes_out(const Cursor& c) const {
  const int64_t before = code_bytes(-col, c.bits), bytes = code_bytes(n, c.bits);
  std::memcpy(c.values + before, codes_ + before, static_cast<size_t>(bytes - before));
}

bool Tile::load(int64_t at_row, int64_t tile, int reads) {
  row = at_row, col = tile * job_.tile - lead_;
  n = static_cast<int>(job_.cols - col < job_.tile ? job_.cols - col : job_.tile);
  int64_t first = col < 0 ? -col : 0, last = n;
  if (row == 0 && job_.front - col > first) first = job_.front - col;
  if (row == job_.rows - 1 && job_.cols - job_.back - col < last)
    last = job_.cols - job_.back - col;
  if (first >= last) return false;
  begin = static_cast<int>(first), end = static_cast<int>(last);
  const int64_t at = row * job_.cols + col - job_.front + first;
  param_ = static_cast<char*>(job_.param) + at * param_bytes_;
  compensation_ = job_.compensation != nullptr ? static_cast<char*>(job_.compensation) +
                                                     (at + job_.front) * compensation_bytes_
                                               : nullptr;
  const void* grad = static_cast<const char*>(job_.grad) + at * grad_bytes_;
  kernel_.load_grad[job_.grad_format](grad, g_ + begin, end - begin);
  if ((reads & kReadsParam) != 0)
    kernel_.load_param[job_.param_format](param_, compensation_, p_ + begin, end - begin);
  prefetch(static_cast<const char*>(grad) + n * grad_bytes_, n * grad_bytes_);
  if (ragged()) {
    blank(g_), blank(p_);
    for (int k = 0; k < 2 * factors_count_; ++k) blank(f_[k]);
  }
  for (int k = 0; (reads & kReadsState) != 0 && k < slots_; ++k) {
    const StateSlot& slot = job_.state[k];
    Cursor& c = cursor_[k];
    c.values = static_cast<char*>(slot.values) + row * code_bytes(job_.cols, c.bits) +
               (col < 0 ? -code_bytes(-col, c.bits) : code_bytes(col, c.bits));
    if (is_cross_tile(slot.kind)) {
      absmax_of(slot.row_absmax, slot.col_absmax, slot.row_stride, absmax_);
      kernel_.dequantize_given[slot.format](codes_in(c), absmax_, s_[k], n);
    } else {
      c.scales = nullptr;
      if (slot.kind == kBlock)
        c.scales = static_cast<char*>(slot.scales) +
                   (row * job_.blocks(slot.block) + block_of(slot)) * c.stored_bytes;
      kernel_.dequantize[slot.format](codes_in(c), c.scales, slot.block, s_[k], n);
    }
  }
  if ((reads & kReadsFactors) != 0 && factors_count_ > 0) load_factors();
  return true;
}

void Tile::load_factors() {
  for (int k = 0; k < 2 * factors_count_; ++k) factors_[k] = f_[k];
  runs([&](int64_t r, int64_t batch, int64_t c, int first, int count) {
    for (int k = 0; k < factors_count_; ++k) {
      const Factor& factor = job_.factor[k];
      const float* cols = factor.col + batch * job_.inner_cols + c;
      std::fill_n(f_[2 * k] + first, count, factor.scaled[r]);
      if (count == n) {  // the tile is part of one row: its columns lie side by side
        factors_[2 * k + 1] = cols;
      } else {
        std::memcpy(f_[2 * k + 1] + first, cols, static_cast<size_t>(count) * sizeof(float));
      }
    }
  });
}

/// The random bits of elements whose group begins `skip_` elements before the tile. Slots count
/// from 1 and the parameter is 0, so no two stored values share bits.
static Draw draw_of(const Job& job, int64_t row, int64_t col, int n, int slot, uint16_t* out) {
  const uint64_t index = static_cast<uint64_t>(job.first + row * job.global_cols + col);
  const int skip = static_cast<int>(index & 7);
  return {job.random, (index >> 3) | static_cast<uint64_t>(slot) << 56, (skip + n + 7) / 8, out};
}

void Tile::update() {
  prefetch(param_ + n * param_bytes_, n * param_bytes_);
  if (compensation_ != nullptr)
    prefetch(compensation_ + n * compensation_bytes_, n * compensation_bytes_);
  skip_ = static_cast<int>((job_.first + row * job_.global_cols + col) & 7);
  const Draw draw = draw_of(job_, row, col, n, 0, random16_);
  kernel_.update[job_.rule](g_, p_, states_, factors_, n, job_.coef, random_ ? &draw : nullptr,
                            finds_absmax_ ? absmax_of_state_ : nullptr);
  if (ragged()) {
    for (int k = 0; k < slots_; ++k) blank(s_[k]);
  }
}

const uint16_t* Tile::draw_for(int slot) {
  if (!job_.state[slot].stochastic) return nullptr;
  kernel_.draw(draw_of(job_, row, col, n, slot + 1, state_random16_));
  return state_random16_ + skip_;
}

void Tile::store() {
  const int64_t cut = job_.cut_row(row);
  const bool found = finds_absmax_ && !ragged();
  for (int k = 0; k < slots_; ++k) {
    const StateSlot& slot = job_.state[k];
    if (slot.kind != kBlock) continue;
    const uint32_t* given =
        cut < 0 ? nullptr : slot.block_next + 2 * (cut * job_.blocks(slot.block) + block_of(slot));
    kernel_.scale[slot.format](s_[k], slot.block, n, given,
                               found ? absmax_of_state_ + k * kMaxOfSlot : nullptr,
                               cursor_[k].scales, scales_[k]);
  }
  for (int k = 0; k < slots_; ++k) {
    const StateSlot& slot = job_.state[k];
    const Cursor& c = cursor_[k];
    const uint16_t* random16 = draw_for(k);
    char* codes = col < 0 ? codes_ : c.values;
    prefetch(c.values + code_bytes(n, c.bits), code_bytes(n, c.bits));
    if (is_cross_tile(slot.kind)) {
      absmax_of(slot.row_next, slot.col_next, slot.row_stride, absmax_);
      kernel_.quantize_given[slot.format](s_[k], codes, absmax_, n, random16);
    } else {
      kernel_.quantize[slot.format](s_[k], codes, scales_[k], slot.block, n, random16);
    }
    if (col < 0) codes_out(c);
  }
  if (job_.write_param)
    kernel_.store_param[job_.param_format](p_ + begin, param_, compensation_, end - begin,
                                           random16_ + skip_ + begin);
}

}  // namespace lowbit::cpu
