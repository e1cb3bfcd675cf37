#include "ops/workspace.h"

#include <cstdint>
#include <numeric>

namespace lowbit {
namespace {

void place_slot(Job& job, StateSlot& slot, bool combines, const Workspace& w,
                WorkspaceSizes& ends) {
  if (slot.kind == kBlock && job.cut != kNoCut) {
    slot.block_next = w.at<uint32_t>(kBlocks, ends[kBlocks]);
    ends[kBlocks] += job.cut_rows() * block_maxima(job.blocks(slot.block));
  }
  if (!is_cross_tile(slot.kind)) return;
  slot.row_stride = slot.kind == kTensor ? 0 : 1;
  if (slot.kind != kColumn) {
    slot.row_next = w.at<uint32_t>(kRowAbsmax, ends[kRowAbsmax]);
    ends[kRowAbsmax] += slot.kind == kTensor ? 1 : job.rows;
  }
  if (slot.kind != kColumn && slot.kind != kRank1) return;
  slot.col_next = w.at<uint32_t>(kColAbsmax, ends[kColAbsmax]);
  ends[kColAbsmax] += job.cols;
  if (slot.kind == kRank1 && combines) {
    slot.col_absmax = w.at<uint32_t>(kFloats, ends[kFloats]);
    ends[kFloats] += job.cols;
  }
}

}  // namespace

Workspace checked_workspace(const Tensors& tensors) {
  Workspace workspace;
  if (tensors.empty()) return workspace;
  STD_TORCH_CHECK(tensors.size() == kWorkspaceTensors, "lowbit::step: a workspace has ",
                  static_cast<int>(kWorkspaceTensors), " tensors, not ", tensors.size(),
                  "; lowbit.ops.workspace makes them");
  for (size_t i = 0; i < tensors.size(); ++i) workspace.data[i] = tensors[i].mutable_data_ptr();
  return workspace;
}

void check_sizes(const Tensors& tensors, const WorkspaceSizes& sizes, const Device& device) {
  STD_TORCH_CHECK(!tensors.empty() || std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == 0,
                  "lowbit::step: this rule or scale is measured before the update and needs the "
                  "workspace that lowbit.ops.workspace makes");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const WorkspaceInfo& info = kWorkspace[i];
    STD_TORCH_CHECK(
        t.scalar_type() == scalar_type(info.dtype) && t.numel() >= sizes[i] && t.is_contiguous(),
        "lowbit::step: workspace tensor '", info.name, "' has ", t.numel(), " elements, expected ",
        sizes[i], " of ", info.dtype);
    STD_TORCH_CHECK(device.has(t), "lowbit::step: workspace tensor '", info.name, "' is on ",
                    Device(t).name(), " and the parameters are on ", device.name());
  }
}

void place(Job& job, const RuleInfo& rule, bool combines, const Workspace& w,
           WorkspaceSizes& ends) {
  job.totals = w.at<int64_t>(kTotals, ends[kTotals]);
  ends[kTotals] += rule.rounds * kRoundTotals;
  const int64_t rows = job.batches * job.inner_rows;
  for (int k = 0; k < rule.factors; ++k) {  // one at a time is measured
    Factor& factor = job.factor[k];
    factor.row_sums = w.at<int64_t>(kRowSums, ends[kRowSums]);
    factor.col_sums = w.at<int64_t>(kColSums, ends[kColSums]);
    factor.scaled = w.at<float>(kFloats, ends[kFloats]);
    ends[kFloats] += rows;
  }
  if (rule.factors > 0) {
    ends[kRowSums] += row_sums(rows);
    ends[kColSums] += col_sums(job.batches, job.inner_cols);
  }
  for (int k = 0; k < rule.slots; ++k) place_slot(job, job.state[k], combines, w, ends);
}

}  // namespace lowbit
