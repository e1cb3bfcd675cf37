#include "cpu/mean.h"

#include <cstring>

#include "catalog/catalog.h"
#include "core/grad.h"
#include "core/mean_bins.h"

namespace lowbit::cpu {
namespace {

template <class G>
void store(const MeanSum& sum, const float* mean, int64_t at, int n) {
  auto* const out = static_cast<typename G::Storage*>(sum.mean) + at;
  for (int i = 0; i < n; ++i) out[i] = G::nearest(mean[i]);
}

template <class... G>
void store_as(Types<G...>, const MeanSum& sum, const float* mean, int64_t at, int n) {
  int i = 0;
  ((i++ == sum.mean_format ? store<G>(sum, mean, at, n) : void()), ...);
}

}  // namespace

void add_means(const MeanSum& sum, int64_t begin, int64_t end, const Kernels& kernel) {
  uint64_t word[kTile];
  alignas(64) float x[kTile];
  const bool merges = sum.addend_format == MeanSum::kWords;
  const int64_t width = merges ? 8 : grad_bytes(sum.addend_format);
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = static_cast<int>(end - at < kTile ? end - at : kTile);
    const size_t bytes = sizeof(uint64_t) * static_cast<size_t>(n);
    if (sum.words != nullptr)
      std::memcpy(word, sum.words + at, bytes);
    else
      std::memset(word, 0, bytes);
    for (int64_t row = 0; row < sum.rows; ++row) {
      const char* from = static_cast<const char*>(sum.addends) + (row * sum.stride + at) * width;
      if (merges) {
        for (int i = 0; i < n; ++i)
          word[i] = bin_merge(word[i], reinterpret_cast<const uint64_t*>(from)[i]);
      } else {
        kernel.load_grad[sum.addend_format](from, x, n);
        kernel.add_bins(word, x, n, sum.width);
      }
    }
    if (sum.mean != nullptr) {
      // Means of 16 bits are rounded to odd first: rounding them again is then the only rounding.
      kernel.mean_bins(word, x, n, sum.width, sum.divisor, grad_bytes(sum.mean_format) < 4);
      store_as(GradFormats{}, sum, x, at, n);
    } else {
      std::memcpy(sum.words + at, word, bytes);
    }
  }
}

}  // namespace lowbit::cpu
