#include "cpu/gradient.h"

#include "catalog/catalog.h"
#include "core/accumulate.h"
#include "core/bits.h"
#include "cpu/matrices/lowrank.h"

namespace lowbit::cpu {

void accumulate(const Accumulation& job, int64_t begin, int64_t end, const Kernels& kernel) {
  const ParamInfo info = param_info(job.format);
  const int width = grad_bytes(job.grad_format);
  const int64_t tiles_per_row = job.tiles_per_row();
  alignas(64) float g[kTile + 16], held[kTile];
  alignas(64) uint16_t random16[kTile + 8 + 7 * 8];
  for (; begin < end; ++begin) {
    const int64_t row = begin / tiles_per_row, col = (begin - row * tiles_per_row) * kTile;
    const int n = static_cast<int>(job.cols - col < kTile ? job.cols - col : kTile);
    const int64_t at = row * job.cols + col;
    const auto index = static_cast<uint64_t>(job.first + row * job.global_cols + col);
    const int skip = static_cast<int>(index & 7);
    auto* const stored = static_cast<char*>(job.held) + at * info.bytes;
    auto* const compensation = job.compensation != nullptr ? static_cast<char*>(job.compensation) +
                                                                 at * info.compensation_bytes
                                                           : nullptr;
    kernel.load_grad[job.grad_format](static_cast<const char*>(job.grad) + at * width, g, n);
    kernel.load_param[job.format](stored, compensation, held, n);
    for (int i = 0; i < n; ++i) held[i] = accumulated(held[i], g[i], job.scale);
    if (info.random)
      kernel.draw({job.random, (index >> 3) | kAccumulateSlot, (skip + n + 7) / 8, random16});
    kernel.store_param[job.format](held, stored, compensation, n,
                                   info.random ? random16 + skip : nullptr);
  }
}

void add_powers(const void* grad, int grad_format, int power, int64_t begin, int64_t end,
                int64_t* words, const Kernels& kernel) {
  constexpr int64_t kCarry = ExactSum::kRoom / kTile;  // tiles
  const int width = grad_bytes(grad_format);
  alignas(64) float x[kTile];
  int64_t since = 0;
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = static_cast<int>(end - at < kTile ? end - at : kTile);
    kernel.load_grad[grad_format](static_cast<const char*>(grad) + at * width, x, n);
    const int64_t before = words[ExactSum::kNonFinite];
    if (power == 1) {
      for (int i = 0; i < n; ++i) x[i] = bits_float(magnitude_bits(x[i]));
      kernel.add(x, n, words);
    } else {
      lowrank_kernels().add_squares(x, n, words);
    }
    if (words[ExactSum::kNonFinite] != before) {
      int64_t nans = 0;
      for (int i = 0; i < n; ++i) nans += is_nan_bits(float_bits(x[i]));
      words[ExactSum::kNonFinite] -= nans;
      words[ExactSum::kWords] += nans;
    }
    if (++since == kCarry - 1) exact_carry(words), since = 0;
  }
  exact_carry(words);
}

}  // namespace lowbit::cpu
