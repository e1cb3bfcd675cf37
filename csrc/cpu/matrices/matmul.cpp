#include "cpu/matrices/matmul.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "core/muon/newton_schulz.h"
#include "cpu/step.h"

namespace lowbit::cpu {
namespace {

using K = MatmulKernels;

// A block of outputs, whose operands are packed for it alone: kDepth rows of b that stay in the
// third cache, and of a that stay in the second.
constexpr int64_t kBlockRows = 192, kBlockCols = 768;
constexpr int64_t kElements = 1 << 16;  // of a pass over elements, for a thread

struct Block {
  int64_t row, rows, col, cols;
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// Blocks of outputs; of a symmetric product those that reach the diagonal.
std::vector<Block> blocks_of(const Product& p) {
  std::vector<Block> made;
  for (int64_t row = 0; row < p.rows; row += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, p.rows - row);
    const int64_t end = p.out_symmetric ? row + rows : p.cols;
    for (int64_t col = 0; col < end; col += kBlockCols)
      made.push_back({row, rows, col, std::min(kBlockCols, end - col)});
  }
  std::reverse(made.begin(), made.end());  // the largest of a symmetric product first
  return made;
}

class Room {
 public:
  Room(const K& kernel, const Product& p)
      : kernel_(kernel),
        stride_(round_up(std::min(kBlockCols, p.cols), kernel.width)),
        a_(static_cast<size_t>(round_up(std::min(kBlockRows, p.rows), kernel.rows) * K::kDepth)),
        b_(static_cast<size_t>(stride_ * K::kDepth)),
        sums_(static_cast<size_t>(round_up(std::min(kBlockRows, p.rows), kernel.rows) * stride_)),
        line_(static_cast<size_t>(stride_)) {}

  void compute(const Product& p, const Block& block) {
    for (int64_t k = 0; k < p.depth; k += K::kDepth) {
      const int depth = static_cast<int>(std::min<int64_t>(K::kDepth, p.depth - k));
      pack(p.b, p.b_transposed, block.col, block.cols, kernel_.width, k, depth, b_.data());
      pack(p.a, !p.a_symmetric, block.row, block.rows, kernel_.rows, k, depth, a_.data());
      for (int64_t j = 0; j < block.cols; j += kernel_.width) {
        for (int64_t i = 0; i < block.rows; i += kernel_.rows) {
          if (p.out_symmetric && block.row + i + kernel_.rows <= block.col + j) continue;
          kernel_.tile(&a_[static_cast<size_t>(i * depth)], &b_[static_cast<size_t>(j * depth)],
                       &sums_[static_cast<size_t>(i * stride_ + j)], stride_, depth, k == 0);
        }
      }
    }
    finish(p, block);
  }

 private:
  /// Panels of `group` rows (by_row) or columns of x each, k-major.
  void pack(const Values& x, bool by_row, int64_t first, int64_t count, int group, int64_t k,
            int depth, float* out) const {
    for (int64_t i = 0; i < count; i += group, out += int64_t{group} * depth) {
      const int n = static_cast<int>(std::min<int64_t>(group, count - i));
      if (by_row) {
        kernel_.pack_rows(x.at + (first + i) * x.stride + k, x.stride, n, group, depth, out);
      } else {
        kernel_.pack_columns(x.at + k * x.stride + first + i, x.stride, n, group, depth, out);
      }
    }
  }

  void finish(const Product& p, const Block& block) {
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t row = block.row + i;
      // Up to the diagonal, which is inside this row's last block.
      const int64_t count =
          p.out_symmetric ? std::min(block.cols, row + 1 - block.col) : block.cols;
      if (count <= 0) continue;
      const float* const sum = &sums_[static_cast<size_t>(i * stride_)];
      const int64_t at = row * p.cols + block.col;
      if (p.sums != nullptr) {
        for (int64_t j = 0; j < count; ++j) {
          p.sums[at + j] = sum[j];
          if (p.out_symmetric) p.sums[(block.col + j) * p.cols + row] = sum[j];
        }
        continue;
      }
      // self may be out of another row's mirror, so that is written from `line_`.
      const uint16_t* const self = p.self != nullptr ? p.self + at : nullptr;
      kernel_.finish(sum, self, p.alpha, p.beta, line_.data(), count);
      for (int64_t j = 0; j < count; ++j) p.out[at + j] = line_[static_cast<size_t>(j)];
      if (p.out_symmetric) {
        for (int64_t j = 0; j < count; ++j)
          p.out[(block.col + j) * p.cols + row] = line_[static_cast<size_t>(j)];
      }
    }
  }

  const K& kernel_;
  int64_t stride_;
  std::vector<float> a_, b_, sums_;
  std::vector<uint16_t> line_;
};

void over_elements(int64_t count, const Parallel& parallel, const Body& body) {
  parallel((count + kElements - 1) / kElements, [&](int64_t begin, int64_t end) {
    body(begin * kElements, std::min(count, end * kElements));
  });
}

float divisor_of(const NewtonSchulz& how, const uint16_t* x, int64_t count,
                 const Parallel& parallel) {
  const K& kernel = matmul_kernels();
  std::mutex mutex;
  uint32_t largest = 0;
  over_elements(count, parallel, [&](int64_t begin, int64_t end) {
    const uint32_t own = kernel.absmax(x + begin, end - begin);
    const std::lock_guard lock(mutex);
    largest = std::max(largest, own);
  });
  if (largest >= kInfinityBits) return bits_float(kCanonicalNan);
  const int exponent = norm_exponent(largest);
  const float factor = static_cast<float>(power_of_two(-exponent));
  int64_t words[ExactSum::kWords] = {};
  over_elements(count, parallel, [&](int64_t begin, int64_t end) {
    int64_t own[ExactSum::kWords] = {};
    for (int64_t at = begin; at < end; at += kElements) {
      kernel.add_squares(x + at, factor, std::min(kElements, end - at), own);
      exact_carry(own);
    }
    const std::lock_guard lock(mutex);
    exact_merge(own, words);
  });
  return norm_divisor(exact_value(words), exponent, how.factor, how.eps);
}

void transpose(const uint16_t* x, int64_t rows, int64_t cols, uint16_t* out,
               const Parallel& parallel) {
  constexpr int64_t kSide = 32;
  parallel((rows + kSide - 1) / kSide, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kSide; i < std::min(rows, last * kSide); i += kSide) {
      for (int64_t j = 0; j < cols; j += kSide) {
        for (int64_t r = i; r < std::min(rows, i + kSide); ++r) {
          for (int64_t c = j; c < std::min(cols, j + kSide); ++c)
            out[c * rows + r] = x[r * cols + c];
        }
      }
    }
  });
}

}  // namespace

const MatmulKernels& matmul_kernels() {
  [[maybe_unused]] const std::string_view isa = kernels().isa;
#if defined(LOWBIT_AVX512)
  if (isa.starts_with(kMatmulAvx512.isa)) return kMatmulAvx512;  // byte permutes do not help here
#endif
#if defined(LOWBIT_AVX2)
  if (isa == kMatmulAvx2.isa) return kMatmulAvx2;
#endif
  return kMatmulBaseline;
}

void multiply(const Product& product, const Parallel& parallel) {
  const K& kernel = matmul_kernels();
  const std::vector<Block> blocks = blocks_of(product);
  std::atomic<size_t> next{0};
  // Whichever blocks a thread is given, it takes the next ones: they differ in size.
  parallel(static_cast<int64_t>(blocks.size()), [&](int64_t, int64_t) {
    size_t i = next.fetch_add(1);
    if (i >= blocks.size()) return;
    Room room(kernel, product);
    for (; i < blocks.size(); i = next.fetch_add(1)) room.compute(product, blocks[i]);
  });
}

void newton_schulz(const NewtonSchulz& how, const uint16_t* x, int64_t rows, int64_t cols,
                   uint16_t* out, const Parallel& parallel) {
  const K& kernel = matmul_kernels();
  const int64_t count = rows * cols;
  if (count == 0) return;
  const bool tall = rows > cols;
  const int64_t n = std::min(rows, cols), m = std::max(rows, cols);
  std::vector<uint16_t> own(static_cast<size_t>(count)), other(static_cast<size_t>(count)),
      gram(static_cast<size_t>(n * n)), update(static_cast<size_t>(n * n));
  const float divisor = divisor_of(how, x, count, parallel);
  if (tall) {
    transpose(x, rows, cols, own.data(), parallel);
    x = own.data();
  }
  over_elements(count, parallel, [&](int64_t begin, int64_t end) {
    kernel.divide(x + begin, divisor, own.data() + begin, end - begin);
  });
  for (int step = 0; step < how.steps; ++step) {
    const double* const coefficient = how.coefficients + 3 * step;
    const auto a = static_cast<float>(coefficient[0]), b = static_cast<float>(coefficient[1]),
               c = static_cast<float>(coefficient[2]);
    const Values now{own.data(), m}, square{gram.data(), n}, factor{update.data(), n};
    multiply({n, n, m, now, now, true, false, true, nullptr, 1.0f, 0.0f, gram.data(), nullptr},
             parallel);
    multiply(
        {n, n, n, square, square, false, true, true, gram.data(), c, b, update.data(), nullptr},
        parallel);
    multiply({n, m, n, factor, now, false, true, false, own.data(), 1.0f, a, other.data(), nullptr},
             parallel);
    std::swap(own, other);
  }
  if (tall) {
    transpose(own.data(), cols, rows, out, parallel);
  } else {
    std::copy(own.begin(), own.end(), out);
  }
}

}  // namespace lowbit::cpu
