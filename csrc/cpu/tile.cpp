#include "cpu/tile.h"

#include "catalog.h"

namespace lowbit::cpu {

Tile::Tile(const Job& job, const Leaves& leaf) : job_(job), leaf_(leaf) {
  const RuleInfo rule = rule_info(job.rule);
  const ParamInfo param = param_info(job.param_format);
  slots_ = rule.slots;
  factors_count_ = rule.factors;
  param_bytes_ = param.bytes;
  extra_bytes_ = param.extra_bytes;
  grad_bytes_ = grad_bytes(job.grad_format);
  random_ = job.write_param && param.random;
  rows_inside_ = job.inner_cols > 0 ? job.cols / job.inner_cols : 1;
  for (int k = 0; k < kMaxSlots; ++k) states_[k] = s_[k];
  for (int k = 0; k < 2 * kMaxFactors; ++k) factors_[k] = f_[k];
  for (int k = 0; k < slots_; ++k) {
    const StateInfo info = state_info(job.state[k].format);
    cursor_[k] = {info.bits, info.scale_bytes, nullptr, nullptr};
  }
}

void Tile::most_of(const uint32_t* rows, const uint32_t* cols, int stride, uint32_t* out) const {
  const uint32_t of_row = rows != nullptr ? rows[row * stride] : ~0u;
  if (cols == nullptr) {
    for (int i = 0; i < n; ++i) out[i] = of_row;
  } else {
    for (int i = 0; i < n; ++i) out[i] = cols[col + i] < of_row ? cols[col + i] : of_row;
  }
}

void Tile::load(int64_t at_row, int64_t tile) {
  row = at_row, col = tile * job_.tile;
  n = static_cast<int>(job_.cols - col < job_.tile ? job_.cols - col : job_.tile);
  const int64_t at = row * job_.cols + col;
  param_ = static_cast<char*>(job_.param) + at * param_bytes_;
  extra_ = job_.extra != nullptr ? static_cast<char*>(job_.extra) + at * extra_bytes_ : nullptr;
  leaf_.load_grad[job_.grad_format](static_cast<const char*>(job_.grad) + at * grad_bytes_, g_, n);
  leaf_.load_param[job_.param_format](param_, extra_, p_, n);
  for (int k = 0; k < slots_; ++k) {
    const StateSlot& slot = job_.state[k];
    Cursor& c = cursor_[k];
    c.values = static_cast<char*>(slot.values) + row * code_bytes(job_.cols, c.bits) +
               code_bytes(col, c.bits);
    if (is_measured(slot.kind)) {
      most_of(slot.row_most, slot.col_most, slot.row_stride, most_);
      leaf_.decode_given[slot.format](c.values, most_, s_[k], n);
    } else {
      c.scales = nullptr;
      if (slot.kind == kBlock)
        c.scales = static_cast<char*>(slot.scales) +
                   (row * ceil_div(job_.cols, slot.block) + col / slot.block) * c.stored_bytes;
      leaf_.decode[slot.format](c.values, c.scales, slot.block, s_[k], n);
    }
  }
  if (factors_count_ == 0) return;
  runs([&](int64_t r, int64_t batch, int64_t c, int first, int count) {
    for (int k = 0; k < factors_count_; ++k) {
      const Factor& factor = job_.factor[k];
      const float* cols = factor.col + batch * job_.inner_cols + c;
      for (int i = 0; i < count; ++i) {
        f_[2 * k][first + i] = factor.scaled[r];
        f_[2 * k + 1][first + i] = cols[i];
      }
    }
  });
}

/// The random bits of elements whose group begins `skip_` elements before the tile; slot counts
/// from 1, the parameter is 0, so that no two things that are stored share bits.
static Draw draw_of(const Job& job, int64_t row, int64_t col, int n, int slot, uint16_t* out) {
  const uint64_t index = static_cast<uint64_t>(job.first + row * job.global_cols + col);
  const int skip = static_cast<int>(index & 7);
  return {job.random, (index >> 3) | static_cast<uint64_t>(slot) << 56, (skip + n + 7) / 8, out};
}

void Tile::update() {
  skip_ = static_cast<int>((job_.first + row * job_.global_cols + col) & 7);
  const Draw draw = draw_of(job_, row, col, n, 0, random16_);
  leaf_.update[job_.rule](g_, p_, states_, factors_, n, job_.coef, random_ ? &draw : nullptr);
}

const uint16_t* Tile::draw_for(int slot) {
  if (!job_.state[slot].stochastic) return nullptr;
  leaf_.draw(draw_of(job_, row, col, n, slot + 1, state_random16_));
  return state_random16_ + skip_;
}

void Tile::store() {
  for (int k = 0; k < slots_; ++k) {
    const StateSlot& slot = job_.state[k];
    const Cursor& c = cursor_[k];
    const uint16_t* random16 = draw_for(k);
    if (is_measured(slot.kind)) {
      most_of(slot.row_next, slot.col_next, slot.row_stride, most_);
      leaf_.encode_given[slot.format](s_[k], c.values, most_, n, random16);
    } else {
      leaf_.encode[slot.format](s_[k], c.values, c.scales, slot.block, n, random16);
    }
  }
  if (job_.write_param)
    leaf_.store_param[job_.param_format](p_, param_, extra_, n, random16_ + skip_);
}

}  // namespace lowbit::cpu
