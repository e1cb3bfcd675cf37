#include "ops_scratch.h"

#include <array>
#include <cstdint>

#include "core/exact_sum.h"
#include "ops_plan.h"

namespace lowbit {

using torch::headeronly::ScalarType;

Scratch checked_scratch(const Tensors& tensors) {
  Scratch s;
  if (tensors.empty()) return s;
  STD_TORCH_CHECK(tensors.size() == 7,
                  "lowbit::step: scratch has seven tensors, as lowbit::scratch makes them");
  s.totals = static_cast<int64_t*>(tensors[0].mutable_data_ptr());
  s.rows = static_cast<int64_t*>(tensors[1].mutable_data_ptr());
  s.cols = static_cast<int64_t*>(tensors[2].mutable_data_ptr());
  s.row_most = static_cast<uint32_t*>(tensors[3].mutable_data_ptr());
  s.col_most = static_cast<uint32_t*>(tensors[4].mutable_data_ptr());
  s.blocks = static_cast<uint32_t*>(tensors[5].mutable_data_ptr());
  s.floats = static_cast<float*>(tensors[6].mutable_data_ptr());
  return s;
}

void check_scratch(const Tensors& tensors, const ScratchSize& size, const Device& device) {
  const std::array<int64_t, 7> want = size.list();
  const ScalarType dtype[] = {ScalarType::Long, ScalarType::Long, ScalarType::Long, ScalarType::Int,
                              ScalarType::Int,  ScalarType::Int,  ScalarType::Float};
  int64_t all = 0;
  for (const int64_t w : want) all += w;
  STD_TORCH_CHECK(!tensors.empty() || all == 0,
                  "lowbit::step: this rule or scale is measured before the update and needs the "
                  "workspace that lowbit::scratch makes");
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(tensors[i].scalar_type() == dtype[i] && tensors[i].numel() >= want[i] &&
                        tensors[i].is_contiguous(),
                    "lowbit::step: scratch tensor ", i, " has ", tensors[i].numel(),
                    " elements, expected ", want[i]);
    STD_TORCH_CHECK(device.has(tensors[i]), "lowbit::step: scratch tensor ", i, " is on ",
                    Device(tensors[i]).name(), " and the parameters are on ", device.name());
  }
}

void place(Job& job, const RuleInfo& rule, const int64_t* row, const Scratch& s, ScratchSize& at) {
  const auto of = [](auto* base, int64_t offset) { return base ? base + offset : base; };
  job.totals = of(s.totals, at.totals);
  at.totals += rule.rounds * kMaxTotals * ExactSum::kWords;
  for (int k = 0; k < rule.factors; ++k) {  // one at a time is measured
    Factor& factor = job.factor[k];
    factor.row_sums = of(s.rows, at.rows);
    factor.col_sums = of(s.cols, at.cols);
    factor.scaled = of(s.floats, at.floats);
    at.floats += job.batches * job.inner_rows;
  }
  if (rule.factors > 0) {
    at.rows += job.batches * job.inner_rows * ExactSum::kWords;
    at.cols += job.batches * (job.inner_cols + 1) * ExactSum::kWords;
  }
  for (int k = 0; k < rule.slots; ++k) {
    StateSlot& slot = job.state[k];
    if (slot.kind == kBlock && job.cut != kNoCut) {
      slot.block_next = of(s.blocks, at.blocks);
      at.blocks += 2 * job.cut_rows() * job.blocks(slot.block);
    }
    if (!is_measured(slot.kind)) continue;
    const bool rows = slot.kind != kColumn, cols = slot.kind == kColumn || slot.kind == kRank1;
    slot.row_stride = slot.kind == kTensor ? 0 : 1;
    if (rows) {
      slot.row_next = of(s.row_most, at.row_most);
      at.row_most += slot.kind == kTensor ? 1 : job.rows;
    }
    if (cols) {
      slot.col_next = of(s.col_most, at.col_most);
      at.col_most += job.cols;
      if (slot.kind == kRank1 && combines(row)) {
        slot.col_most = reinterpret_cast<uint32_t*>(of(s.floats, at.floats));
        at.floats += job.cols;
      }
    }
  }
}

}  // namespace lowbit
