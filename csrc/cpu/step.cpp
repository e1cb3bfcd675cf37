#include "cpu/step.h"

#include "core/registry.h"

namespace lowbit::cpu {
namespace {

template <class... S>
constexpr int bits_of(int format, Types<S...>) {
  const int bits[] = {S::kBits...};
  return bits[format];
}
template <class... P>
constexpr int bytes_of_param(int format, Types<P...>) {
  const int bytes[] = {static_cast<int>(sizeof(typename P::Storage))...};
  return bytes[format];
}
template <class... P>
constexpr bool draws_random(int format, Types<P...>) {
  const bool draws[] = {P::kRandom...};
  return draws[format];
}
template <class... U>
constexpr int slots_of(int rule, Types<U...>) {
  const int slots[] = {U::kSlots...};
  return slots[rule];
}

struct Cursor {
  int format, block, bits;
  char* values;   // of the row
  float* scales;  // of the row
};

}  // namespace

void step(const Job& job, int64_t begin, int64_t end, const Leaves& leaf) {
  alignas(64) float g[kTile], p[kTile], s[kMaxSlots][kTile];
  alignas(64) uint16_t random16[kTile + 8 + 7 * 8];
  float* const states[kMaxSlots] = {s[0], s[1], s[2], s[3]};
  const int slots = slots_of(job.rule, UpdateRules{});
  const int param_bytes = bytes_of_param(job.param_format, ParamFormats{});
  const int grad_bytes = bytes_of_param(job.grad_format, GradFormats{});
  const bool random = job.write_param && draws_random(job.param_format, ParamFormats{});
  const int64_t tiles_per_row = job.tiles_per_row();

  while (begin < end) {
    const int64_t row = begin / tiles_per_row, first_tile = begin - row * tiles_per_row;
    const int64_t tiles =
        end - begin < tiles_per_row - first_tile ? end - begin : tiles_per_row - first_tile;
    char* const params = static_cast<char*>(job.param) + row * job.cols * param_bytes;
    const char* const grads = static_cast<const char*>(job.grad) + row * job.cols * grad_bytes;
    Cursor cursor[kMaxSlots];
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = job.state[k];
      const int bits = bits_of(slot.format, StateFormats{});
      cursor[k] = {slot.format, slot.block, bits,
                   static_cast<char*>(slot.values) + row * code_bytes(job.cols, bits),
                   slot.scales ? slot.scales + row * ceil_div(job.cols, slot.block) : nullptr};
    }

    for (int64_t tile = first_tile; tile < first_tile + tiles; ++tile) {
      const int64_t col = tile * kTile;
      const int n = static_cast<int>(job.cols - col < kTile ? job.cols - col : kTile);
      char* const param = params + col * param_bytes;
      char* values[kMaxSlots];
      float* scales[kMaxSlots];

      leaf.load_grad[job.grad_format](grads + col * grad_bytes, g, n);
      leaf.load_param[job.param_format](param, p, n);
      for (int k = 0; k < slots; ++k) {
        const Cursor& c = cursor[k];
        values[k] = c.values + code_bytes(col, c.bits);
        scales[k] = c.scales ? c.scales + tile * (kTile / c.block) : nullptr;
        leaf.decode[c.format](values[k], scales[k], c.block, s[k], n);
      }
      const uint64_t index = static_cast<uint64_t>(job.first + row * job.global_cols + col);
      const int skip = static_cast<int>(index & 7);
      const Draw draw{job.random, index >> 3, (skip + n + 7) / 8, random16};
      leaf.update[job.rule](g, p, states, n, job.coef, random ? &draw : nullptr);
      for (int k = 0; k < slots; ++k) {
        const Cursor& c = cursor[k];
        leaf.encode[c.format](s[k], values[k], scales[k], c.block, n);
      }
      if (job.write_param) leaf.store_param[job.param_format](p, param, n, random16 + skip);
    }
    begin += tiles;
  }
}

}  // namespace lowbit::cpu
