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
  char* values;
  float* scales;
};

}  // namespace

void step(const Job& job, int64_t begin, int64_t end, const Leaves& leaf) {
  alignas(64) float g[kTile], p[kTile], s[kMaxSlots][kTile];
  alignas(64) uint16_t random16[kTile + 64 + 8];  // whole groups, rounded up to eight of them
  float* states[kMaxSlots] = {s[0], s[1], s[2], s[3]};
  const int slots = slots_of(job.rule, UpdateRules{});
  const int param_bytes = bytes_of_param(job.param_format, ParamFormats{});
  const int grad_bytes = bytes_of_param(job.grad_format, GradFormats{});
  const bool random = job.write_param && draws_random(job.param_format, ParamFormats{});
  const int64_t tiles_per_row = job.tiles_per_row();

  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t row = tile / tiles_per_row, col = (tile - row * tiles_per_row) * kTile;
    const int n = static_cast<int>(job.cols - col < kTile ? job.cols - col : kTile);
    const int64_t at = row * job.cols + col;
    char* param = static_cast<char*>(job.param) + at * param_bytes;
    Cursor cursor[kMaxSlots];

    leaf.load_grad[job.grad_format](static_cast<const char*>(job.grad) + at * grad_bytes, g, n);
    leaf.load_param[job.param_format](param, p, n);
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = job.state[k];
      const int bits = bits_of(slot.format, StateFormats{});
      cursor[k].values = static_cast<char*>(slot.values) + row * code_bytes(job.cols, bits) + code_bytes(col, bits);
      cursor[k].scales = slot.scales ? slot.scales + row * ceil_div(job.cols, slot.block) + col / slot.block : nullptr;
      leaf.decode[slot.format](cursor[k].values, cursor[k].scales, slot.block, s[k], n);
    }
    leaf.update[job.rule](g, p, states, n, job.coef);
    for (int k = 0; k < slots; ++k) {
      leaf.encode[job.state[k].format](s[k], cursor[k].values, cursor[k].scales, job.state[k].block, n);
    }
    if (!job.write_param) continue;
    const uint16_t* bits16 = nullptr;
    if (random) {
      const uint64_t index = static_cast<uint64_t>(job.first + row * job.global_cols + col);
      const int skip = static_cast<int>(index & 7);
      leaf.random(job.random, index >> 3, static_cast<int>(ceil_div(skip + n, 8)), random16);
      bits16 = random16 + skip;
    }
    leaf.store_param[job.param_format](p, param, n, bits16);
  }
}

}  // namespace lowbit::cpu
