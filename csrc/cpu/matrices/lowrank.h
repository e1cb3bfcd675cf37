// APOLLO and Fira on the CPU: passes over one parameter, each over a range that the caller splits
// among threads. The result of a pass does not depend on the split, nor on how ranks share the rows
// of the parameter. Ranks reduce words, sums and `absmax`. docs/definitions/lowrank.md gives the
// order of the passes.
//
// tall: R >= C of the whole parameter. L and N are then [rows][rank], P is [C][rank], and scales
// are per row. Otherwise L and N are [rank][C], P is [R][rank] (a rank needs its own rows), and
// scales are per column.
#pragma once

#include <cstdint>

#include "core/exact_sum.h"
#include "core/lowrank/fixed.h"
#include "core/lowrank/limiter.h"
#include "core/lowrank/projection.h"
#include "core/lowrank/scaling.h"
#include "core/random.h"
#include "cpu/matrices/lowrank_kernels.h"

namespace lowbit::cpu {

/// The kernels of the instruction set in use (cpu/step.h).
const LowRankKernels& lowrank_kernels();

/// Contiguous local rows of a gradient.
struct GradRows {
  const void* data;
  int format;  // index into GradFormats
  int64_t rows, cols;
  float scale;  // multiplies every element
};

/// Loads n <= kTile elements of row i, starting at column col, scaled.
void load(const GradRows& g, int64_t i, int64_t col, int n, float* out);

/// Local rows of a parameter, like those of the gradient.
struct ParamRows {
  void* data;
  void* compensation;  // the format's compensation or correction bits, or null
  int format;          // index into ParamFormats
  int64_t first;       // global flat index of the element (0, 0)
  RandomKey random;
};

/// s: one for each row, one for each column, or a single one.
enum class Channel { kRow, kColumn, kTensor };
struct Scales {
  const float* s;
  Channel channel;
};

/// Generates rows [begin, end) of P, global indices. `p` points at row `begin`.
void make_projection(const ProjectionKey& key, int64_t begin, int64_t end, float* p);

/// Tall. L[i][k] = sum_c G[i][c] P[c][k] for local rows [begin, end).
void project_rows(const GradRows& g, const float* p, int64_t rank, int64_t begin, int64_t end,
                  float* low);

/// Not tall, first round: absmax[j] = max_i |G[i][j]| as bits, for columns [begin, end). Ranks:
/// MAX.
void column_absmax(const GradRows& g, int64_t begin, int64_t end, int32_t* absmax);
/// Second round: sums[k][j], [rank][cols], for columns [begin, end); p: the local rows. Ranks: SUM.
void project_columns(const GradRows& g, const float* p, int64_t rank, int projection_exponent,
                     const int32_t* absmax, int64_t begin, int64_t end, int64_t* sums);
/// L from the reduced sums, for columns [begin, end).
void column_values(const int64_t* sums, const int32_t* absmax, int64_t rank, int64_t cols,
                   int projection_exponent, int64_t begin, int64_t end, float* low);

/// s = |N| / (|L| + 1e-8) for rows [begin, end) (tall) or columns [begin, end) (not tall).
void row_scales(const float* n, const float* low, int64_t rank, int64_t begin, int64_t end,
                float* s);
void column_scales(const float* n, const float* low, int64_t rank, int64_t cols, int64_t begin,
                   int64_t end, float* s);
/// Adds the squares of x[begin, end) to ExactSum words and carries. The scale of the whole tensor
/// is norm_ratio(exact_value(words of N), exact_value(words of L)) after a reduction (SUM) over
/// ranks.
void add_squares(const float* x, int64_t begin, int64_t end, int64_t* words);

/// APOLLO. Adds the squares of the unlimited update of local rows [begin, end) to words, and
/// carries.
void apollo_norm(const GradRows& g, Scales s, const Scaling& c, int64_t begin, int64_t end,
                 int64_t* words);
/// Steps the parameter.
void apollo_step(const GradRows& g, Scales s, const Scaling& c, const ParamRows& p, int64_t begin,
                 int64_t end);

/// Maps X back to local rows [begin, end) of the parameter's shape, out: [rows][cols]. Tall:
/// out[i][c] = sum_k X[i][k] P[c][k]. Not tall: out[i][j] = sum_k P[i][k] X[k][j].
void back(const float* x, const float* p, int64_t rank, int64_t cols, bool tall, int64_t begin,
          int64_t end, float* out);
/// Fira. residual, [rows][cols], = (G - alpha back(L)) * s. Adds its squares to words, and carries.
void fira_norm(const GradRows& g, const float* low, const float* p, int64_t rank, bool tall,
               Scales s, const Scaling& c, int64_t begin, int64_t end, float* residual,
               int64_t* words);
/// Steps the parameter by alpha back(N) + residual / divisor. g gives the shape only.
void fira_step(const GradRows& g, const float* n, const float* p, int64_t rank, bool tall,
               const Scaling& c, const float* residual, const ParamRows& param, int64_t begin,
               int64_t end);

}  // namespace lowbit::cpu
