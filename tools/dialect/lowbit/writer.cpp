// Writing lowbit's state: what lowbit.load_optimizer would make of the source, bit for bit.

#include <algorithm>
#include <map>
#include <optional>
#include <span>

#include "catalog/catalog.h"
#include "core/layout.h"
#include "dialect/common/other_libraries.h"
#include "dialect/lowbit/lowbit.h"
#include "dialect/model/formats.h"
#include "dialect/model/parameter_names.h"
#include "dialect/model/presets.h"
#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/floats.h"
#include "dialect/numbers/means.h"
#include "dialect/numbers/numbers.h"
#include "dialect/requantize/cross_tile_quantize.h"
#include "dialect/requantize/dequantize.h"
#include "dialect/requantize/quantize.h"
#include "dialect/tree/algorithm.h"
#include "dialect/tree/optimizer_tree.h"
#include "io/text.h"
#include "policy/full_precision.h"
#include "policy/names.h"

namespace lowbit::ckpt {
namespace {

class LowbitWriter {
 public:
  LowbitWriter(const Model& model, const Wanted& wanted, DialectReport& report)
      : model_(model),
        wanted_(wanted),
        report_(report),
        own_(model.dialect == "lowbit"),
        keeps_formats_(wanted.state_format.empty()) {}

  Result<Document> write() {
    if (lowbit_settings(model_.algorithm).empty()) return no_optimizer(model_, "lowbit");
    out_ = begun(model_);
    out_.leaves = model_.rest;
    const std::vector<const Group*> group_of = groups_by_param(model_);
    for (size_t i = 0; i < model_.params.size(); ++i)
      RETURN_IF_ERROR(param(model_.params[i], *group_of[i]));
    const auto settings = [&](const Group& group) {
      return lowbit_group(model_, wanted_, group, used_);
    };
    RETURN_IF_ERROR(add_groups(model_, settings, out_.leaves));
    return std::move(out_);
  }

 private:
  /// An option in the source's first override whose pattern matches the parameter; null if there is
  /// none, or if the source is not lowbit's.
  const Value* overridden(const Param& p, const Group& group, const char* option) const {
    const Value* overrides = own_ ? setting(group, "overrides") : nullptr;
    if (overrides == nullptr) return nullptr;
    const std::string known = p.name.empty() ? std::to_string(p.index) : clean_name(p.name);
    for (size_t i = 0; overrides->is_dict() && i + 1 < overrides->items.size(); i += 2) {
      const Value &pattern = overrides->items[i], &options = overrides->items[i + 1];
      if (name_fits(known, {pattern.text}))
        return options.is_dict() ? options.find(option) : nullptr;
    }
    return nullptr;
  }

  /// The same, or else the option of its group.
  const Value* own_option(const Param& p, const Group& group, const char* option) const {
    if (const Value* said = overridden(p, group, option)) return said;
    return own_ ? setting(group, option) : nullptr;
  }

  bool named_full_precision(const Param& p, const Group& group) const {
    if (name_fits(p.name, wanted_.full_precision)) return true;
    const Value* said = own_option(p, group, "full_precision");
    if (said == nullptr) return false;
    if (said->is(Value::Kind::kBool)) return said->integer != 0;
    std::vector<std::string> patterns;
    if (said->is(Value::Kind::kText)) patterns.push_back(said->text);
    for (const Value& pattern : said->items) patterns.push_back(pattern.text);
    return name_fits(p.name, patterns);
  }

  bool in_full_precision(const Param& p, const Group& group) const {
    const Value* least = own_option(p, group, "min_numel");
    std::optional<int64_t> min_numel;
    if (least != nullptr && least->is(Value::Kind::kInt)) min_numel = least->integer;
    return is_full_precision(p.shape, min_numel) || named_full_precision(p, group);
  }

  /// Whether lowbit's own state stays as it is: nothing else was asked for, or an override of the
  /// source decides its format, as it would in an optimizer with that override.
  bool stays(const Param& p, const State& s, const Group& group) const {
    std::string state, format;
    return own_ && wanted_.block == 0 && !name_fits(p.name, wanted_.full_precision) &&
           (keeps_formats_ || overridden(p, group, "state_format") != nullptr) &&
           split_key(s.own[0].first, state, format);
  }

  Status param(const Param& p, const Group& group) {
    const auto at = [&](const std::string& name) { return state_path(model_, p, name); };
    if (p.states.empty() && p.numbers.empty()) return fine();  // it never was stepped
    const Value* step = number_in(p, "step");
    const bool counts =
        model_.algorithm != "sgd" && model_.algorithm != "lars" && model_.algorithm != "lion" &&
        !(model_.algorithm == "muon" && !p.states.empty() && p.states[0].name == "momentum_buffer");
    double steps = !counts && !p.states.empty() ? 1 : 0;  // SGD, LARS, Lion, Muon need none
    if (step != nullptr) {
      ASSIGN_OR_RETURN(counted, steps_of(*step, shown(p) + ": its step"));
      steps = counted;
    } else if (counts) {
      return bad(shown(p) + ": has no step");
    }
    out_.leaves.push_back(scalar_leaf(at("step"), static_cast<float>(steps)));
    int64_t stream = p.name.empty() ? p.index : int64_t{stream_of(p.name)};
    if (const Value* said = number_in(p, "stream"); said != nullptr && own_) stream = said->integer;
    out_.leaves.push_back(scalar_leaf(at("stream"), stream));
    coded_ = false;
    for (const State& s : p.states) {
      RETURN_IF_ERROR(state(p, s, group));
    }
    if (coded_) put_shape(p);
    const Value* said = number_in(p, "update_norm");
    if (model_.algorithm == "adafactor" || said != nullptr) {  // and in APOLLO's subspace
      float norm = 0;
      if (said != nullptr) {
        ASSIGN_OR_RETURN(real, real_of(*said, shown(p) + ": update_norm"));
        norm = static_cast<float>(real);
      }
      out_.leaves.push_back(scalar_leaf(at("update_norm"), norm));
    }
    return fine();
  }

  /// The format that the state gets. The source's codes stay where nothing else was asked for.
  Result<StateSpec> spec_for(const Param& p, const State& s, const Group& group) {
    if (in_full_precision(p, group)) {
      if (keeps_formats_) return StateSpec{"float32"};
      ASSIGN_OR_RETURN(said, spec_of(wanted_.state_format, s.is_signed, wanted_.block));
      if (is_slow_state(s.name)) return slow_mean_spec(said, true);
      return said.coded() || said.factored() ? StateSpec{"float32"} : said;
    }
    if (keeps_formats_ && wanted_.block == 0) {
      const bool fits = s.codes && s.codes->block >= kMinBlock && s.codes->block <= kMaxBlock &&
                        (s.codes->block & (s.codes->block - 1)) == 0;
      if (fits) return StateSpec{s.codes->format, "block", s.codes->block};
      if (s.stored_as == "bfloat16" && own_) return StateSpec{"bfloat16"};
      if (own_ && s.stored_as == "float32") return StateSpec{"float32"};
    }
    if (is_weight_state(s.name))
      return StateSpec{s.stored_as == "bfloat16" ? "bfloat16" : "float32"};
    ASSIGN_OR_RETURN(
        spec, spec_of(keeps_formats_ ? "8bit" : wanted_.state_format, s.is_signed, wanted_.block));
    if (is_slow_state(s.name)) return slow_mean_spec(spec, false);
    if (spec.factored() && p.shape.size() < 2) return StateSpec{"float32"};
    return spec;
  }

  /// Whether lowbit has the group's rule with that moment as means of rows and columns.
  bool can_factor(const Param& p, const State& s, const Group& group) const {
    const bool other_rule =
        is_on(group, "cautious") || is_on(group, "amsgrad") || is_on(group, "rank");
    const std::string own = model_.algorithm == "muon" ? "adam" : model_.algorithm;
    const int known = find_rule(own + "_factored");
    if (other_rule || known < 0) return false;
    const RuleInfo rule = rule_info(known);
    const std::span factors(rule.factor, static_cast<size_t>(rule.factors));
    const std::span slots(rule.slot, static_cast<size_t>(rule.slots));
    const auto is_factor = [&](const State& state) {
      return std::ranges::find(factors, state.name) != factors.end();
    };
    return is_factor(s) && std::ranges::all_of(p.states, [&](const State& state) {
             return !is_moment(state.name) || is_factor(state) ||
                    std::ranges::any_of(slots,
                                        [&](const Slot& slot) { return state.name == slot.name; });
           });
  }

  /// Leaves of the source under the same keys, as they are.
  void copy(const Param& p, const State& s) {
    for (const Leaf* leaf : s.leaves) {
      Leaf same = *leaf;
      // The key is what the path ends with, or what follows the parameter's name in a flat one.
      std::string key = leaf->path.back().text();
      if (leaf->path.size() <= model_.root.size() + 1) key = key.substr(key.rfind('.') + 1);
      same.path = state_path(model_, p, key);
      out_.leaves.push_back(std::move(same));
    }
    report_of(report_, p, s, s.stored_as, true);
  }

  Status state(const Param& p, const State& s, const Group& group) {
    const bool factor =
        s.name.ends_with("_row") || s.name.ends_with("_col") || s.name == kRowMoments;
    if (s.values == nullptr || (!is_moment(s.name) && !factor)) return put_raw(p, s);
    if (factor) {
      put_float32(p, s, s.shape);
      return fine();
    }
    if (stays(p, s, group)) {
      coded_ = coded_ || s.leaves.size() > 1;  // codes and scales
      copy(p, s);
      return fine();
    }
    if (!p.known_shape && !(s.codes && keeps_formats_ && wanted_.block == 0))
      return bad(shown(p) +
                 ": the checkpoint does not tell its shape; give the one with its weights as "
                 "--model PATH");
    ASSIGN_OR_RETURN(spec, spec_for(p, s, group));
    if (spec.factored()) {
      if (!can_factor(p, s, group))
        return usage(shown(p) + ": lowbit's optimizer of these states cannot keep " + s.name +
                     " as means of rows and columns; take another --state-format");
      put_means(p, s);
      return fine();
    }
    if (!spec.coded()) return put_plain(p, s, spec);
    used_.emplace(s.name, spec);
    coded_ = true;
    return spec.scale == "rank1" ? put_rank_one(p, s, spec) : put_blocks(p, s, spec);
  }

  /// The compensation of a weight, as its key in lowbit holds it, or Fira's projection.
  Status put_raw(const Param& p, const State& s) {
    const bool compensation = s.name.starts_with("param_");
    if (s.raw && compensation) {
      Leaf leaf = *s.raw;
      leaf.path = state_path(model_, p, s.name);
      out_.leaves.push_back(std::move(leaf));
      report_of(report_, p, s, s.name, true);
      return fine();
    }
    if (own_ && (compensation || s.name == "projection")) {
      copy(p, s);
      return fine();
    }
    return lost_values(p, s);
  }

  /// A state in float32 or bfloat16.
  Status put_plain(const Param& p, const State& s, const StateSpec& spec) {
    if (spec.format == "float32") {
      put_float32(p, s, p.shape);
      return fine();
    }
    const std::string key = s.name + "_bfloat16";
    if (s.stored_as == "bfloat16" && s.leaves.size() == 1 && s.leaves[0]->shape == p.shape) {
      put(p, key, *s.leaves[0]);
      report_of(report_, p, s, "bfloat16", true);
      return fine();
    }
    RETURN_IF_ERROR(check_keep(p, s));
    StateReport* report = report_of(report_, p, s, "bfloat16", true);
    out_.leaves.push_back(tensor_leaf(state_path(model_, p, key), find_dtype("bfloat16"), p.shape,
                                      bfloat16_source(s.values, report)));
    return fine();
  }

  /// A quantized state with an absmax along each dimension.
  Status put_rank_one(const Param& p, const State& s, const StateSpec& spec) {
    RETURN_IF_ERROR(check_keep(p, s));
    StateReport* report = report_of(report_, p, s, spec.format + ", rank 1", true);
    const FormatInfo& info = *find_format(spec.format);
    const auto [rows, cols] = matrix_of(p.shape);
    const std::string key = s.name + "_" + spec.format;
    std::vector<int> dims;
    for (size_t d = 0; d < p.shape.size(); ++d) dims.push_back(static_cast<int>(d));
    std::vector<CrossTileScale> scales;
    const Codes codes = quantized_cross_tile(s.values, p.shape, spec.format, dims, scales, report);
    out_.leaves.push_back(tensor_leaf(state_path(model_, p, key), info.dtype,
                                      {rows, code_bytes(cols, info.bits)}, codes.codes));
    for (size_t d = 0; d < scales.size(); ++d)
      out_.leaves.push_back(
          tensor_leaf(state_path(model_, p, key + "_scale_rank1_" + std::to_string(d)),
                      find_dtype("float32"), {p.shape[d]}, scales[d].absmax));
    return fine();
  }

  /// A quantized state with a scale for each block: the codes of the source if they are the ones
  /// that are wanted, new ones else.
  Status put_blocks(const Param& p, const State& s, const StateSpec& spec) {
    const FormatInfo& info = *find_format(spec.format);
    const auto [rows, cols] = matrix_of(p.shape);
    const std::string key = s.name + "_" + spec.format;
    const std::string to = spec.format + ", blocks of " + std::to_string(spec.block);
    Codes codes;
    if (same_codes(s, spec, rows, cols)) {
      codes = *s.codes;
      report_of(report_, p, s, to, true);
    } else {
      RETURN_IF_ERROR(check_keep(p, s));
      codes = quantized(s.values, p.shape, spec.format, spec.block,
                        report_of(report_, p, s, to, false));
    }
    Leaf values = tensor_leaf(state_path(model_, p, key), info.dtype,
                              {rows, code_bytes(cols, info.bits)}, codes.codes);
    Leaf scales =
        tensor_leaf(state_path(model_, p, key + "_scale"), info.scale_dtype,
                    {rows, info.scale_numbers * ceil_div(cols, spec.block)}, codes.scales);
    if (s.codes && codes.codes == s.codes->codes) {
      stored_as_it_is(s, values);
      stored_as_it_is(s, scales);
    }
    out_.leaves.push_back(std::move(values));
    out_.leaves.push_back(std::move(scales));
    return fine();
  }

  /// What the codes do not say.
  void put_shape(const Param& p) {
    Shape shape = p.shape;
    if (const Value* said =
            number_in(p, "shape")) {  // of a low-rank state, whose codes have another
      shape.clear();
      for (const Value& size : said->items) shape.push_back(size.integer);
    } else if (!p.known_shape) {
      return;
    }
    std::string bytes(reinterpret_cast<const char*>(shape.data()), shape.size() * sizeof(int64_t));
    out_.leaves.push_back(tensor_leaf(state_path(model_, p, "shape"), find_dtype("int64"),
                                      {static_cast<int64_t>(shape.size())},
                                      constant_source(std::move(bytes), sizeof(int64_t))));
  }

  /// Whether the codes there are those that are wanted: rows may be cut out of one long one where
  /// blocks do not cross them.
  static bool same_codes(const State& s, const StateSpec& spec, int64_t rows, int64_t cols) {
    if (!s.codes || s.codes->format != spec.format || s.codes->block != spec.block) return false;
    if (s.codes->rows == rows && s.codes->cols == cols) return true;
    return s.codes->rows * s.codes->cols == rows * cols && cols % spec.block == 0 &&
           s.codes->cols % spec.block == 0;
  }

  /// Says that a leaf's bytes are those of a tensor in the file, where they are.
  static void stored_as_it_is(const State& s, Leaf& leaf) {
    for (const Leaf* from : s.leaves) {
      if (from->source == leaf.source && from->shape == leaf.shape && from->dtype == leaf.dtype)
        leaf.stored = from->stored;
    }
  }

  Status check_keep(const Param& p, const State& s) const {
    if (!wanted_.keep) return fine();
    return mismatch(shown(p) + ": " + s.name + " (" + s.stored_as +
                    ") would be rounded; leave --keep out, or take another --state-format");
  }

  void put(const Param& p, const std::string& key, const Leaf& from) {
    Leaf leaf = tensor_leaf(state_path(model_, p, key), from.dtype, from.shape, from.source);
    leaf.stored = from.stored;
    out_.leaves.push_back(std::move(leaf));
  }

  void put_float32(const Param& p, const State& s, const Shape& shape) {
    out_.leaves.push_back(float32_leaf(state_path(model_, p, s.name), s, shape));
    report_of(report_, p, s, "float32", true);
  }

  void put_means(const Param& p, const State& s) {
    if (!warned_means_)
      report_.warnings.push_back(s.name +
                                 " is kept as means of rows and columns: single values are gone");
    warned_means_ = true;
    const auto& values = s.values;
    for (const bool rows : {true, false}) {
      Shape shape = p.shape;
      shape.erase(shape.end() - (rows ? 1 : 2));
      out_.leaves.push_back(tensor_leaf(state_path(model_, p, s.name + (rows ? "_row" : "_col")),
                                        find_dtype("float32"), shape,
                                        float32_source(means_of(values, p.shape, rows))));
    }
    report_of(report_, p, s, "means of rows and columns", false);
  }

  const Model& model_;
  const Wanted& wanted_;
  DialectReport& report_;
  Document out_;
  const bool own_, keeps_formats_;
  bool warned_means_ = false;
  std::map<std::string, StateSpec> used_;
  bool coded_ = false;  // a state of the parameter at hand
};

}  // namespace

Result<Document> write_lowbit(const Model& model, const Wanted& wanted, DialectReport& report) {
  if (!wanted.state_format.empty()) {
    // Checked before anything else, so that a typing mistake is reported as one.
    ASSIGN_OR_RETURN(
        spec,
        spec_of(wanted.state_format,
                wanted.state_format.ends_with("_unsigned") ? false : model.algorithm != "adagrad",
                wanted.block));
    (void)spec;
  }
  return LowbitWriter(model, wanted, report).write();
}

}  // namespace lowbit::ckpt
