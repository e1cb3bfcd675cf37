// Writing state as lpmm keeps it: 4 bits by groups of the flattened tensor, or with scales of rank
// 1, and its settings beside them.
#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/lpmm/config.h"
#include "dialect/lpmm/lpmm.h"
#include "dialect/lpmm/rank_one.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kThreshold = 4096;  // larger tensors are quantized

struct LpmmWriter {
  const Model& model;
  const Param& param;
  const LpmmConfig& config;
  const Wanted& wanted;
  DialectReport& report;
  std::vector<Leaf>& leaves;

  Path at(const std::string& key) const { return state_path(model, param, key); }

  Status state(const State& s) {
    const bool factor = s.name == "exp_avg_sq_row" || s.name == "exp_avg_sq_col";
    const auto* known = std::ranges::find(kLpmmStates, s.name);
    if (!factor && known == std::end(kLpmmStates))
      return leave_out(param, s, "lpmm", wanted, report);
    if (s.values == nullptr) return lost_values(param, s);
    if (factor) {
      plain(s);
      if (s.name.ends_with("col")) qstate("exp_avg_sq", false);
      return fine();
    }
    const auto n = volume(s.shape);
    const bool enable = config.quantized && n > static_cast<uint64_t>(kThreshold) &&
                        !stays_full_precision(param, wanted);
    if (!enable) {
      plain(s);
      qstate(s.name, false);
      return fine();
    }
    return config.rank1 && !is_signed_state(s.name) && s.shape.size() > 1 ? rank_one(s) : groups(s);
  }

  void plain(const State& s) {
    report_of(report, param, s, "float32", true);
    leaves.push_back(
        tensor_leaf(at(s.name), find_dtype("float32"), s.shape, float32_source(s.values)));
  }

  Path qstate(const std::string& name, bool enable) {
    const Path path = at(name + "_qstate");
    leaves.push_back(value_leaf(below(path, "enable"), Value::boolean(enable)));
    if (!enable)
      leaves.push_back(value_leaf(below(path, "overhead"), Value{.kind = Value::Kind::kDict}));
    const std::vector<float> map = codebook_of(LpmmConfig::format(is_signed_state(name)));
    leaves.push_back(tensor_leaf(below(path, "qmap"), find_dtype("float32"),
                                 {static_cast<int64_t>(map.size())}, held_floats(map)));
    return below(path, "overhead");
  }

  void common(const Path& overhead, const State& s) {
    Value stride = Value::tuple({});
    for (const int64_t n : row_major(s.shape)) stride.items.push_back(Value::number(n));
    leaves.push_back(value_leaf(below(overhead, "dtype"),
                                Value{.kind = Value::Kind::kGlobal, .text = "torch float32"}));
    leaves.push_back(value_leaf(below(overhead, "stride"), std::move(stride)));
  }
  void scaled_shape(const Path& overhead, const Shape& shape) {
    leaves.push_back(value_leaf(below(overhead, "scaled_shape"), size_value(shape)));
  }
  /// With the byte behind them, which means nothing.
  void codes_leaf(const State& s, const BlockLayout& layout, std::shared_ptr<Source> codes) {
    const auto bytes = static_cast<int64_t>(layout.elements());
    leaves.push_back(tensor_leaf(at(s.name), find_dtype("int8"), {bytes + 1},
                                 filled_up(std::move(codes), layout.elements(), 0)));
  }

  Status groups(const State& s) {
    const std::string format = LpmmConfig::format(s.is_signed);
    const auto rule = std::make_shared<TableRule>(codebook_of(format));
    const uint64_t n = volume(s.shape);
    BlockLayout layout{.count = n, .block = kLpmmGroup, .bits = LpmmConfig::kBits};
    layout.coded = layout.blocks() * kLpmmGroup;
    layout.stored = (layout.coded + kLpmmPack - 1) / kLpmmPack * kLpmmPack;
    layout.filler = rule->nearest(0.0f);
    const bool own = flat_codes(s, format, kLpmmGroup) && n % kLpmmGroup == 0;
    if (wanted.keep && !own) return would_round(param, s, "lpmm's");
    StateReport* entry =
        report_of(report, param, s, "lpmm 4-bit " + format + ", groups of 128", own);
    const auto groups = static_cast<int64_t>(layout.blocks());
    std::shared_ptr<Source> codes, scales;
    if (own) {
      // Codes of lowbit's, with what lpmm puts behind them.
      codes = filled_up(s.codes->codes, n / 2,
                        static_cast<uint8_t>(layout.filler | layout.filler << 4));
      scales = s.codes->scales;
    } else {
      const auto& values = s.values;
      codes = block_codes(rule, layout, values, entry);
      scales = float32_source(block_scales(rule, layout, values, 0));
    }
    codes_leaf(s, layout, std::move(codes));
    const Path overhead = qstate(s.name, true);
    common(overhead, s);
    leaves.push_back(tensor_leaf(below(overhead, "max1"), find_dtype("float32"), {groups, 1},
                                 std::move(scales)));
    scaled_shape(overhead, {groups, kLpmmGroup});
    return fine();
  }

  Status rank_one(const State& s) {
    const std::string format = LpmmConfig::format(s.is_signed);
    if (wanted.keep) return would_round(param, s, "lpmm's");
    StateReport* entry =
        report_of(report, param, s, "lpmm 4-bit " + format + ", rank-1 scales", false);
    BlockLayout layout{.count = volume(s.shape), .bits = LpmmConfig::kBits};
    layout.coded = layout.count;
    layout.stored = (layout.count + kLpmmPack - 1) / kLpmmPack * kLpmmPack;
    // One row: lpmm's codes know nothing of rows.
    auto [codes, limit] = rank_one_codes(s.values, s.shape, codebook_of(format), layout, entry);
    codes_leaf(s, layout, std::move(codes));
    const Path overhead = qstate(s.name, true);
    common(overhead, s);
    leaves.push_back(
        value_leaf(below(overhead, "dim"), Value::number(static_cast<int64_t>(s.shape.size()))));
    for (size_t d = 0; d < s.shape.size(); ++d) {
      Shape shape(s.shape.size(), 1);
      shape[d] = s.shape[d];
      leaves.push_back(tensor_leaf(below(overhead, "max_dims", place(d)), find_dtype("float32"),
                                   shape, limit[d]));
    }
    leaves.push_back(value_leaf(below(overhead, "max1"), Value::none()));
    scaled_shape(overhead, s.shape);
    return fine();
  }
};

/// `unfused`: none of its states is copied, so that none has the form of lpmm's fused step.
Settings settings_for(const Model& model, const Group& group, bool unfused) {
  if (model.dialect == "lpmm") {
    Settings own = group.settings;
    if (unfused && is_on(group, "fused")) set_in(own, "fused", Value::boolean(false));
    return own;
  }
  Settings s = settings_elsewhere(group);
  if (model.algorithm != "adam") return s;
  set_in(s, "fused", Value::boolean(false));
  set_in(s, "use_first_moment", Value::boolean(true));
  bool factored = false;
  for (const size_t p : group.params) {
    for (const State& state : model.params[p].states) factored |= state.name == "exp_avg_sq_row";
  }
  set_in(s, "factor_second_moment", Value::boolean(factored));
  return s;
}

}  // namespace

Result<Document> write_lpmm(const Model& model, const Wanted& wanted, DialectReport& report) {
  if (model.flattened) return bad("lpmm's states cannot be flattened");
  const bool own = model.dialect == "lpmm" && wanted.state_format.empty();
  ASSIGN_OR_RETURN(config, LpmmConfig::of(wanted));
  RETURN_IF_ERROR(check_algorithm(model, "lpmm", {"adam", "sgd"}));
  Document out = begun(model);
  for (const Param& param : model.params) {
    const bool copied = own && !stays_full_precision(param, wanted);
    LpmmWriter writer{model, param, config, wanted, report, out.leaves};
    // Its SGD counts no steps, and takes a parameter that has any entry for one with a buffer.
    const bool counts = model.algorithm != "sgd" && !param.states.empty();
    if (const Value* said = copied || counts ? number_in(param, "step") : nullptr) {
      ASSIGN_OR_RETURN(step, real_of(*said, shown(param) + ", step"));
      out.leaves.push_back(scalar_leaf(writer.at("step"), static_cast<float>(step)));
    }
    for (const State& s : param.states) {
      if (!param.known_shape && !copied) return no_shape(param);
      if (copied) {
        report_of(report, param, s, s.stored_as, true);
        for (const Leaf* leaf : s.leaves) out.leaves.push_back(*leaf);
      } else {
        RETURN_IF_ERROR(writer.state(s));
      }
    }
  }
  RETURN_IF_ERROR(add_groups(
      model, [&](const Group& group) { return settings_for(model, group, !own); }, out.leaves));
  if (own) {
    for (const Leaf& leaf : model.document->leaves) {
      if (is_lpmm_config(model, leaf)) out.leaves.push_back(leaf);
    }
  } else {
    out.leaves.push_back(value_leaf(below(model.root, "qconfig"), config.value()));
  }
  for (const Leaf& leaf : model.rest) {
    if (!is_lpmm_config(model, leaf)) out.leaves.push_back(leaf);
  }
  return out;
}

}  // namespace lowbit::ckpt
