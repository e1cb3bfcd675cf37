#include "container/deepspeed/momentum.h"

#include <algorithm>

#include "container/manifest/box.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The elements of all parameters of which a rank has a slice, and whether these lie one after the
/// other in its vector as they do whole.
struct WholeParameters {
  uint64_t length = 0;
  bool same = true;
};

WholeParameters whole_parameters(const RankVector& rank, const Lengths& lengths) {
  WholeParameters out;
  for (const Fragment& f : rank.fragments) {
    const uint64_t all = lengths.at(f.name);
    out.same = out.same && f.first == out.length && f.count == all;
    out.length += all;
  }
  return out;
}

std::string count_text(uint64_t count) { return std::to_string(count) + " elements"; }

}  // namespace

std::optional<bool> configured_for_slices(const PartFile& file) {
  // Of the two optimizers of stages 1 and 2, BF16_Optimizer alone does not write its stage.
  if (!file.has_below({"optimizer_state_dict", "zero_stage"})) return true;
  const Path zero = {"ds_config", "zero_optimization"};
  if (!file.has_below(zero)) return std::nullopt;
  const Value* device = file.value(below(zero, "offload_optimizer", "device"));
  if (device != nullptr && device->is(Value::Kind::kText)) return device->text != "none";
  return file.is_on(below(zero, "cpu_offload"));  // its deprecated name
}

bool is_stepped_by_muon(const PartFile& file, const Path& groups, size_t flat) {
  for (size_t i = 0; file.has_below(below(groups, place(i))); ++i) {
    const Path group = below(groups, place(i));
    const Value* params = file.value(below(group, "params"));
    const bool here = params != nullptr && std::ranges::any_of(params->items, [&](const Value& v) {
                        return v.is(Value::Kind::kInt) && v.integer == static_cast<int64_t>(flat);
                      });
    if (here) return file.is_on(below(group, "use_muon"));
  }
  return false;
}

Result<bool> holds_whole_parameters(const Lengths& lengths, const std::vector<RankVector>& ranks,
                                    const std::vector<RankMomentum>& momenta) {
  const RankMomentum *not_slices = nullptr, *not_whole = nullptr, *ambiguous = nullptr;
  std::optional<bool> configured;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankMomentum& m = momenta[rank];
    if (m.what.empty()) continue;
    const WholeParameters whole = whole_parameters(ranks[rank], lengths);
    const bool of_slices = m.length == m.unpadded || m.length == m.unpadded + m.padding;
    const bool of_whole = m.length == whole.length;
    if (!of_slices && !of_whole)
      return bad(m.what + ", and not " + count_text(m.unpadded + m.padding) +
                 " as of the slices of its parameters, nor " + count_text(whole.length) +
                 " as of the whole parameters");
    if (!of_slices) not_slices = &m;
    if (!of_whole) not_whole = &m;
    if (of_slices && of_whole && !whole.same) ambiguous = &m;
    if (!configured) configured = m.slices;
  }
  if (not_slices != nullptr && not_whole != nullptr)
    return bad(not_slices->what + ", as of whole parameters, and " + not_whole->what +
               ", as of the slices of its parameters: are the files of one save?");
  if (not_slices != nullptr || not_whole != nullptr || ambiguous == nullptr)
    return not_slices != nullptr;
  if (configured) return !*configured;
  return bad(ambiguous->what +
             ", which fits the slices of its parameters and the whole parameters. Momentum is of "
             "slices where the optimizer was offloaded (zero_optimization.offload_optimizer), and "
             "the file does not hold the configuration: load the checkpoint with DeepSpeed, with "
             "its configuration given as a dict, and save it again");
}

}  // namespace lowbit::ckpt
