// Writing state as the newest generation of adafactor-8bit keeps it: second moments as al8,
// momentum as uf8, or d8 where it is that already.
#include "dialect/adafactor8bit/adafactor8bit.h"
#include "dialect/adafactor8bit/rules.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kBlock = 2048, kMomentumBlock = 256;
constexpr int64_t kMinQuantized = 4096;

struct Adafactor8bitWriter {
  const Model& model;
  const Param& param;
  const Wanted& wanted;
  DialectReport& report;
  std::vector<Leaf>& leaves;
  bool quantized = false;

  Path at(const std::string& key) const { return state_path(model, param, key); }

  void plain(const State& s, const std::string& x, const Shape& shape) {
    report_of(report, param, s, "float32", true);
    leaves.push_back(tensor_leaf(at(x), find_dtype("float32"), shape, float32_source(s.values)));
  }

  void shape_leaves(const std::string& x, const Shape& shape, uint64_t pad) {
    leaves.push_back(value_leaf(at(x + "_shape"), size_value(shape)));
    leaves.push_back(value_leaf(at(x + "_pad"), Value::number(static_cast<int64_t>(pad))));
  }

  Status second(const State& s, const std::string& x, const Shape& shape) {
    if (!quantized) {
      plain(s, x, shape);
      return fine();
    }
    BlockLayout layout{.count = volume(shape), .block = kBlock};
    layout.coded = layout.stored = layout.blocks() * kBlock;
    const auto blocks = static_cast<int64_t>(layout.blocks());
    const bool own = flat_codes(s, "log8", kBlock) && layout.stored == layout.count;
    const bool copied = !own && model.dialect == "adafactor8bit" && s.leaves.size() == 3 &&
                        s.leaves[0]->dtype->bytes == 1 &&
                        volume(s.leaves[0]->shape) == layout.stored &&
                        volume(s.leaves[1]->shape) == layout.blocks();
    if (wanted.keep && !own && !copied) return would_round(param, s, "adafactor-8bit's");
    StateReport* entry =
        report_of(report, param, s, "adafactor-8bit al8, blocks of 2048", own || copied);
    const auto rule = second_moment_rule(AdafactorFiles::kAdaptive8);
    std::shared_ptr<Source> codes, scales, minimum;
    if (own) {
      codes = s.codes->codes;
      scales = every_other(s.codes->scales, 0);
      minimum = every_other(s.codes->scales, 1);
    } else if (copied) {
      codes = s.leaves[0]->source, scales = s.leaves[1]->source, minimum = s.leaves[2]->source;
    } else {
      const auto& values = s.values;
      codes = block_codes(rule, layout, values, entry);
      scales = float32_source(block_scales(rule, layout, values, 0));
      minimum = float32_source(block_scales(rule, layout, values, 1));
    }
    const Dtype* f32 = find_dtype("float32");
    leaves.push_back(tensor_leaf(at(x + "_q"), find_dtype("uint8"), {blocks, kBlock}, codes));
    leaves.push_back(tensor_leaf(at(x + "_scale"), f32, {blocks}, scales));
    leaves.push_back(tensor_leaf(at(x + "_min_log"), f32, {blocks}, minimum));
    shape_leaves(x, shape, layout.stored - layout.count);
    return fine();
  }

  Status momentum(const State& s) {
    if (!quantized) {
      plain(s, "m", s.shape);
      return fine();
    }
    BlockLayout layout{.count = volume(s.shape), .block = kMomentumBlock};
    layout.coded = layout.stored = layout.blocks() * kMomentumBlock;
    const bool copied = model.dialect == "adafactor8bit" && s.leaves.size() == 2 &&
                        s.stored_as.find("uf8") != std::string::npos &&
                        s.leaves[0]->shape == Shape{static_cast<int64_t>(layout.stored)} &&
                        volume(s.leaves[1]->shape) == layout.blocks();
    // d8 is lowbit's dynamic8, and uf8 its uniform8.
    const bool whole = !copied && layout.stored == layout.count;
    const bool dynamic = whole && flat_codes(s, "dynamic8", kMomentumBlock);
    const bool own = dynamic || (whole && flat_codes(s, "uniform8", kMomentumBlock));
    if (wanted.keep && !copied && !own) return would_round(param, s, "adafactor-8bit's");
    const auto kind = dynamic ? AdafactorMomentum::kDynamic8 : AdafactorMomentum::kUniform8;
    StateReport* entry = report_of(
        report, param, s, std::string("adafactor-8bit ") + name_of(kind) + ", blocks of 256",
        copied || own);
    const auto& values = s.values;
    const auto rule = momentum_rule(kind);
    leaves.push_back(tensor_leaf(at("m_q"), find_dtype("uint8"),
                                 {static_cast<int64_t>(layout.stored)},
                                 copied ? s.leaves[0]->source
                                 : own  ? s.codes->codes
                                        : block_codes(rule, layout, values, entry)));
    leaves.push_back(tensor_leaf(at("m_scale"), find_dtype("float32"),
                                 {static_cast<int64_t>(layout.blocks())},
                                 copied ? s.leaves[1]->source
                                 : own  ? s.codes->scales
                                        : float32_source(block_scales(rule, layout, values, 0))));
    leaves.push_back(value_leaf(at("m_block_size"), Value::number(kMomentumBlock)));
    leaves.push_back(value_leaf(at("m_quant_type"), Value::words(name_of(kind))));
    return fine();
  }

  /// All leaves of the parameter.
  Status write() {
    int64_t step = 0;
    if (const Value* said = number_in(param, "step")) {
      ASSIGN_OR_RETURN(whole, whole_of(*said, shown(param) + ", step"));
      step = whole;
    }
    leaves.push_back(value_leaf(at("step"), Value::number(step)));
    leaves.push_back(value_leaf(at("is_quantized"), Value::boolean(quantized)));
    leaves.push_back(value_leaf(at("block_size"), Value::number(kBlock)));
    if (const Value* said = number_in(param, "update_norm"); said != nullptr) {
      ASSIGN_OR_RETURN(norm, real_of(*said, shown(param) + ", update_norm"));
      if (norm != 0) leaves.push_back(scalar_leaf(at("fira_prev_norm"), static_cast<float>(norm)));
    }
    for (const State& s : param.states) RETURN_IF_ERROR(state(s));
    if (quantized) leaves.push_back(value_leaf(at("v_quant_type"), Value::words("al8")));
    return fine();
  }

  Status state(const State& s) {
    const bool variance = s.name == "variance" || s.name == "exp_avg_sq";
    const bool row = s.name.ends_with("_row"), confidence = s.name.starts_with("exp_avg_res");
    if (s.name != "exp_avg" && !variance && !row && !s.name.ends_with("_col"))
      return leave_out(param, s, "adafactor-8bit", wanted, report);
    if (s.values == nullptr) return lost_values(param, s);
    if (s.name == "exp_avg") return momentum(s);
    if (variance) return second(s, "variance", s.shape);
    Shape shape = s.shape;
    shape.insert(row ? shape.end() : shape.end() - 1, 1);
    return second(s, confidence ? (row ? "conf_row" : "conf_col") : (row ? "row_var" : "col_var"),
                  shape);
  }
};

/// A setting, which is taken out of `s`; lowbit's default for that algorithm where there is none.
Value taken(Settings& s, const char* name, const char* algorithm) {
  if (auto said = take_from(s, name)) return std::move(*said);
  const Value* usual = setting(lowbit_settings(algorithm), name);
  return usual == nullptr ? Value::none() : *usual;
}

Value item(const Value& tuple, size_t i) {
  return i < tuple.items.size() ? tuple.items[i] : Value::none();
}

/// lowbit.CAME's settings under the names of that package, with those that make its one optimizer
/// CAME (0.4.6: _CAME in presets.py). Its second eps is that of Adafactor, at its default.
Settings came_settings(const Group& group) {
  Settings s = settings_elsewhere(group);
  const Value betas = taken(s, "betas", "came"), eps = taken(s, "eps", "came");
  set_in(s, "beta1", item(betas, 0));
  set_in(s, "beta2", item(betas, 1));
  set_in(s, "beta2_decay", Value::none());
  set_in(s, "beta3", item(betas, 2));
  set_in(s, "eps", Value::tuple({item(eps, 0), Value::floating(1e-3)}));
  set_in(s, "eps_came", item(eps, 1));
  set_in(s, "d", taken(s, "clip_threshold", "came"));
  set_in(s, "factored", Value::boolean(true));
  for (const char* off : {"relative_step", "scale_parameter", "scale_weight_decay"})
    set_in(s, off, Value::boolean(false));
  return s;
}

/// lowbit.Adafactor's settings under the names of that package, without those that it does not
/// have, and with those that it reads from each group (0.4.6: optimizer.py, step).
Settings adafactor_settings(const Group& group, DialectReport& report) {
  Settings s = settings_elsewhere(group);
  for (const char* name : {"add_eps", "rank", "update_proj_gap", "scale_type", "projection"})
    take_from(s, name);
  // Its Fira is switched on by a setting of its own.
  const auto margin = take_from(s, "fira_margin");
  if (margin && !margin->is(Value::Kind::kNone)) {
    set_in(s, "enable_fira_for_adafactor", Value::boolean(true));
    set_in(s, "fira_margin", *margin);
  }
  Settings usual = {{"beta1", Value::none()},
                    {"beta2", Value::none()},
                    {"beta3", Value::none()},
                    {"relative_step", Value::boolean(true)},
                    {"scale_parameter", Value::boolean(true)}};
  for (auto& [key, value] : usual) {
    if (!has_setting(group, key)) set_in(s, key, std::move(value));
  }
  const auto by = take_from(s, "decay_by");
  const std::string said = by && by->is(Value::Kind::kText) ? by->text : "lr";
  set_in(s, "scale_weight_decay", Value::boolean(said == "alpha"));
  const Value* relative = setting(group, "relative_step");
  if (said == "lr" && is_on(group, "weight_decay") && (relative == nullptr || relative->is_on()))
    report.warnings.push_back(
        "adafactor-8bit decays weights by the relative step, not by lr as here: where that is "
        "smaller than lr, its next steps decay less");
  return s;
}

/// Adam's under the names of that package, with those that make its one optimizer AdamW (0.4.6:
/// _ADAMW in presets.py). Its second eps is that of Adafactor, at its default.
Settings adam_settings(const Group& group) {
  Settings s = settings_elsewhere(group);
  const Value betas = taken(s, "betas", "adam"), eps = taken(s, "eps", "adam");
  set_in(s, "beta1", item(betas, 0));
  set_in(s, "beta2", item(betas, 1));
  set_in(s, "beta2_decay", Value::none());
  set_in(s, "beta3", Value::none());
  set_in(s, "eps", Value::tuple({eps, Value::floating(1e-3)}));
  set_in(s, "d", Value::floating(0));
  for (const char* off : {"factored", "relative_step", "scale_parameter", "scale_weight_decay"})
    set_in(s, off, Value::boolean(false));
  return s;
}

}  // namespace

Result<Document> write_adafactor8bit(const Model& model, const Wanted& wanted,
                                     DialectReport& report) {
  const std::string& f = wanted.state_format;
  if (!f.empty() && f != "8bit" && f != "log8" && f != "float32")
    return usage("adafactor-8bit's states are not written as " + printable(f) +
                 "; take 8bit (of 0.4.0 and later) or float32");
  if (wanted.block != 0 && wanted.block != kBlock)
    return usage("adafactor-8bit's blocks are written with 2048 values");
  RETURN_IF_ERROR(check_algorithm(model, "adafactor-8bit", {"adafactor", "adam", "came"}));
  if (model.flattened) return bad("adafactor-8bit loads no flattened state");
  Document out = begun(model);
  for (const Param& param : model.params) {
    if (param.states.empty()) continue;
    if (!param.known_shape) return no_shape(param);
    const uint64_t n = volume(param.shape);
    Adafactor8bitWriter writer{
        model,      param,
        wanted,     report,
        out.leaves, f != "float32" && n >= kMinQuantized && !stays_full_precision(param, wanted)};
    RETURN_IF_ERROR(writer.write());
  }
  // Its own groups as the file has them, without what reading made of them.
  std::vector<Group> own;
  if (model.dialect == "adafactor8bit") {
    ASSIGN_OR_RETURN(tree, optimizer_tree_of(*model.document));
    if (tree.groups.size() == model.groups.size()) own = std::move(tree.groups);
  }
  const auto settings_for = [&](const Group& group) {
    if (!own.empty()) return own[static_cast<size_t>(&group - model.groups.data())].settings;
    if (model.dialect == "adafactor8bit") return group.settings;
    const std::string& is = model.algorithm;
    Settings s = is == "came"        ? came_settings(group)
                 : is == "adafactor" ? adafactor_settings(group, report)
                 : is == "adam"      ? adam_settings(group)
                                     : settings_elsewhere(group);
    set_in(s, "quantize", Value::boolean(f != "float32"));
    set_in(s, "block_size", Value::number(kBlock));
    set_in(s, "min_8bit_size", Value::number(kMinQuantized));
    return s;
  };
  RETURN_IF_ERROR(add_groups(model, settings_for, out.leaves));
  out.leaves.insert(out.leaves.end(), model.rest.begin(), model.rest.end());
  return out;
}

}  // namespace lowbit::ckpt
