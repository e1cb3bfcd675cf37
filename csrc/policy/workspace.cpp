#include "policy/workspace.h"

#include <algorithm>

#include "catalog/json.h"

namespace lowbit {

std::vector<Region> round_regions(const PlanRow& row, int round, bool grid) {
  std::vector<Region> made{{.tensor = kTotals,
                            .begin = round * kRoundTotals,
                            .width = kRoundTotals,
                            .rows = Region::kNone}};
  if (!grid) return made;
  // Of each row of the first dimension. A single matrix is one row of the grid each.
  const int64_t rows = row.global_cols / std::max<int64_t>(row.global_inner_cols, 1);
  made.push_back({.tensor = kRowSums, .begin = 0, .width = row_sums(rows), .rows = Region::kEach});
  const bool matrix = row.numel == row.global_inner_rows * row.global_inner_cols;
  const int64_t matrices = matrix ? 1 : rows / std::max<int64_t>(row.global_inner_rows, 1);
  made.push_back({.tensor = kColSums,
                  .begin = 0,
                  .width = col_sums(matrices, row.global_inner_cols),
                  .rows = matrix ? Region::kNone : Region::kEach});
  return made;
}

std::vector<Region> scale_regions(const PlanRow& row, int slots) {
  Job job{};  // knows which rows are cut
  job.rows = row.rows, job.front = row.front, job.back = row.back;
  job.cut = static_cast<int>(row.cut);
  std::vector<Region> made;
  int64_t ends[kWorkspaceTensors] = {};
  const auto add = [&](WorkspaceTensor tensor, int64_t width, Region::Rows rows) {
    made.push_back({.tensor = tensor, .begin = ends[tensor], .width = width, .rows = rows});
    const int64_t counts[] = {1, row.rows, job.cut_rows()};
    ends[tensor] += width * counts[rows];
  };
  for (int k = 0; k < slots; ++k) {
    const int64_t kind = row.slot[k].scale;
    if (kind == kBlock)
      add(kBlocks, block_maxima(ceil_div(row.global_cols, row.slot[k].block)), Region::kCut);
    if (kind == kRow || kind == kRank1) add(kRowAbsmax, 1, Region::kEach);
    if (kind == kTensor) add(kRowAbsmax, 1, Region::kNone);
    if (kind == kColumn || kind == kRank1) add(kColAbsmax, row.global_cols, Region::kNone);
  }
  return made;
}

std::string workspace_json() {
  std::vector<std::string> tensors, rows;
  for (const WorkspaceInfo& info : kWorkspace) {
    tensors.push_back(json::object({{"name", json::text(info.name)},
                                    {"dtype", json::text(info.dtype)},
                                    {"reduction", json::text(info.reduction)}}));
  }
  for (const char* name : kRegionRows) rows.push_back(json::text(name));
  return json::object({{"tensors", json::array(tensors)},
                       {"rows", json::array(rows)},
                       {"sum_words", std::to_string(ExactSum::kWords)}});
}

}  // namespace lowbit
