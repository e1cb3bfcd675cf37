// The inner loops of products of bfloat16 matrices (cpu/matrices/matmul.h), one table for each
// instruction set. All give the same bits.
#pragma once

#include <cstdint>

namespace lowbit::cpu {

struct MatmulKernels {
  static constexpr int kDepth = 256;   // terms of a pass over a block
  static constexpr int kMaxRows = 16;  // bounds of `rows` and `width`
  static constexpr int kMaxWidth = 48;

  const char* isa;
  int rows, width;  // of a tile of outputs, which stays in registers
  /// sum[i][j] = (first ? 0 : sum[i][j]) + a[0][i] b[0][j] + a[1][i] b[1][j] + ... in this order,
  /// for i < rows, j < width; a: [depth][rows], b: [depth][width], sum: `stride` floats a row.
  void (*tile)(const float* a, const float* b, float* sum, int64_t stride, int depth, bool first);
  /// out[k][i] = x[i][k] for i < n, 0 for i < group, k < depth, as float32; x: `stride` values a
  /// row.
  void (*pack_rows)(const uint16_t* x, int64_t stride, int n, int group, int depth, float* out);
  /// out[k][i] = x[k][i], likewise.
  void (*pack_columns)(const uint16_t* x, int64_t stride, int n, int group, int depth, float* out);
  /// core/muon/newton_schulz.h over n elements. self: null if beta is 0.
  void (*finish)(const float* sum, const uint16_t* self, float alpha, float beta, uint16_t* out,
                 int64_t n);
  /// out = x / divisor.
  void (*divide)(const uint16_t* x, float divisor, uint16_t* out, int64_t n);
  /// The largest magnitude, as bits of a float.
  uint32_t (*absmax)(const uint16_t* x, int64_t n);
  /// Adds the squares of x * factor to ExactSum words; n <= ExactSum::kRoom.
  void (*add_squares)(const uint16_t* x, float factor, int64_t n, int64_t* words);
};

extern const MatmulKernels kMatmulBaseline;
extern const MatmulKernels kMatmulAvx2;  // each where it is compiled: LOWBIT_AVX2, ...
extern const MatmulKernels kMatmulAvx512;

}  // namespace lowbit::cpu
