// The workspace that the phases of one step share: its tensors, and how many numbers of a parameter
// each of them has. This is the one definition; Python reads the tensors from the catalog and asks
// `workspace_regions` where a parameter's numbers lie.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/exact_sum.h"
#include "core/layout.h"
#include "policy/plan.h"

namespace lowbit {

enum WorkspaceTensor : int {
  kTotals,     // sums over tensors
  kRowSums,    // of factored moments
  kColSums,    // of factored moments
  kRowAbsmax,  // of cross-tile scales, as bits
  kColAbsmax,  // of cross-tile scales, as bits
  kBlocks,     // maxima of blocks that are cut, as bits
  kFloats,     // what no other shard needs
  kWorkspaceTensors
};

struct WorkspaceInfo {
  const char *name, *dtype;
  const char* reduction;  // over the shards: "sum", "max", or "" where there is none
};
inline constexpr WorkspaceInfo kWorkspace[] = {
    {"totals", "int64", "sum"},     {"rows", "int64", "sum"},       {"cols", "int64", "sum"},
    {"row_absmax", "int32", "max"}, {"col_absmax", "int32", "max"}, {"blocks", "int32", "max"},
    {"floats", "float32", ""}};
static_assert(sizeof kWorkspace / sizeof *kWorkspace == kWorkspaceTensors);

/// Numbers that one round measures over a whole tensor.
inline constexpr int64_t kRoundTotals = kMaxTotals * ExactSum::kWords;
/// Numbers of the sums of rows.
constexpr int64_t row_sums(int64_t rows) { return rows * ExactSum::kWords; }
/// Numbers of the sums of columns, and of the old rows behind them, of each matrix.
constexpr int64_t col_sums(int64_t matrices, int64_t cols) {
  return matrices * (cols + 1) * ExactSum::kWords;
}
/// Numbers of a cut row's blocks: the largest and the smallest magnitude of each.
constexpr int64_t block_maxima(int64_t blocks) { return 2 * blocks; }

/// Consecutive numbers of one parameter in one tensor of the workspace, that several ranks measure.
struct Region {
  /// Which rows of the parameter's first dimension have `width` numbers each.
  enum Rows : int { kNone, kEach, kCut, kRows };  // kNone: `width` numbers in all
  WorkspaceTensor tensor;
  int64_t begin;  // behind the parameter's first number in the tensor
  int64_t width;
  Rows rows;
};

/// What a round measures. grid: whether it measures rows and columns of a factored moment.
std::vector<Region> round_regions(const PlanRow& row, int round, bool grid);
/// What the phase after the rounds measures for so many slots: the maxima of scales.
std::vector<Region> scale_regions(const PlanRow& row, int slots);

inline constexpr const char* kRegionRows[] = {"none", "each", "cut"};
static_assert(sizeof kRegionRows / sizeof *kRegionRows == Region::kRows);

/// {"tensors": [{"name", "dtype", "reduction"}, ...], "rows": [names of Region::Rows], "sum_words":
/// of an exact sum}.
std::string workspace_json();

}  // namespace lowbit
