// Writing state as FlashOptim keeps it, of either generation.
#include <algorithm>
#include <cstring>
#include <set>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "dialect/common/other_libraries.h"
#include "dialect/common/rounding.h"
#include "dialect/flashoptim/flashoptim.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "dialect/tree/weights.h"
#include "io/scratch_buffer.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// What was asked for by --state-format.
struct Form {
  bool compressed = true;
  FlashFiles generation = FlashFiles::kNew;
};
Result<Form> form_of(const Wanted& wanted) {
  const std::string& f = wanted.state_format;
  if (wanted.block != 0 && wanted.block != kFlashBlock)
    return usage("FlashOptim's blocks have 32 values, not " + std::to_string(wanted.block));
  if (f.empty() || f == "8bit" || f == "companded8" || f == "0.1.4") return Form{};
  if (f == "0.1.3") return Form{true, FlashFiles::kOld};
  if (f == "float32") return Form{false, FlashFiles::kNew};
  if (f == "bfloat16") return Form{false, FlashFiles::kOld};
  return usage("FlashOptim keeps no state as " + printable(f) +
               "; it has 0.1.4 (or 8bit) and 0.1.3, which are its compressed states of either "
               "generation, and float32 and bfloat16 without compression");
}

/// The dtypes of weights, as they will be.
struct WeightDtypes {
  const Model& model;
  const std::string& rounded;  // --weights
  const Weights weights{model};
  const std::set<std::string> norms = norms_of(model.rest);

  /// Where anything tells it: what is beside the weight, how a file of 0.1.4 keeps its scales, or
  /// the weight itself. Null where nothing does.
  Result<const Dtype*> of(const Param& param) const {
    if (const State* beside = beside_of(param))
      return find_dtype(beside->name.starts_with("param_bfloat16") ? "bfloat16" : "float16");
    ASSIGN_OR_RETURN(weight, weights.find(param.name, Weights::Asked::kDtype));
    if (weight != nullptr && !rounded.empty() && weight->dtype->bytes == 4 &&
        !is_of_norm(weight->name(), norms))
      return find_dtype(rounded.starts_with("float16") ? "float16" : "bfloat16");
    if (weight != nullptr) return weight->dtype;
    for (const State& s : param.states) {
      for (const Leaf* leaf : s.leaves) {
        if (model.dialect == "flashoptim" && leaf->name().ends_with("::scales") &&
            std::string_view(leaf->dtype->name) == "bfloat16")
          return leaf->dtype;
      }
    }
    return nullptr;
  }
};

struct FlashOptimWriter {
  const Model& model;
  const WeightDtypes& dtypes;
  const Param& param;
  const Form& form;
  const Wanted& wanted;
  DialectReport& report;
  std::vector<Leaf>& leaves;

  Path at(const std::string& key) const { return state_path(model, param, key); }

  Status state(const State& s) {
    bool known = false;
    for (const char* m : kFlashMoments) known = known || s.name == m;
    if (!known) return leave_out(param, s, "FlashOptim", wanted, report);
    if (s.values == nullptr) return lost_values(param, s);
    if (!form.compressed || stays_full_precision(param, wanted)) return plain(s);
    const uint64_t n = volume(s.shape);
    const bool is_signed = is_signed_state(s.name);
    const bool own =
        flat_codes(s, is_signed ? "companded8" : "companded8_unsigned", kFlashBlock).has_value();
    const Dtype* dtype = nullptr;
    if (form.generation == FlashFiles::kNew) {
      ASSIGN_OR_RETURN(found, dtypes.of(param));
      dtype = found;
    }
    if (form.generation == FlashFiles::kNew && dtype == nullptr && !from_flat_scales(s))
      return bad(
          shown(param) +
          ": FlashOptim 0.1.4 keeps scales in the weight's type, which this checkpoint does not "
          "tell; " +
          (param.name.empty() ? "its parameters are numbered, so that no weight is known to be "
                                "theirs; save it with "
                                "their names, or"
                              : "convert one that has the weights too, or name it as --model, or") +
          " take --state-format float32, which every version loads");
    const bool bits = dtype != nullptr && std::string_view(dtype->name) == "bfloat16";
    const Dtype* scale_dtype = find_dtype(bits ? "bfloat16" : "float16");
    const Shape blocks = {static_cast<int64_t>(blocks_in(n))};
    const Dtype* code_dtype = find_dtype(is_signed ? "int8" : "uint8");
    // Codes of its own file that ours cannot express, because a block goes over rows.
    const bool relabelled =
        own || (model.dialect == "flashoptim" && s.leaves.size() == 2 &&
                !is_by_shard(*s.leaves[0], *s.leaves[1], *model.document->manifest));
    if (wanted.keep && !relabelled) return would_round(param, s, "FlashOptim's");
    StateReport* entry = report_of(
        report, param, s,
        std::string("FlashOptim companded 8-bit, scales as in ") + versions_of(form.generation),
        relabelled);
    std::shared_ptr<Source> codes, scales;
    if (own) {
      codes = is_signed ? mapped_bytes(s.codes->codes, moved_bytes(-127)) : s.codes->codes;
      scales = s.codes->scales;
    } else if (relabelled) {
      codes = s.leaves[0]->source;
      scales = s.leaves[1]->source;
    } else {
      const auto& values = s.values;
      const auto layout = flash_layout(n, is_signed);
      codes = block_codes(flash_rule(is_signed), layout, values, entry);
      scales = float16_source(block_scales(flash_rule(is_signed), layout, values, 0));
    }
    leaves.push_back(
        tensor_leaf(at(s.name + "::quantized"), code_dtype, s.shape, std::move(codes)));
    leaves.push_back(tensor_leaf(at(s.name + "::scales"), scale_dtype, blocks, std::move(scales)));
    return fine();
  }

  /// float16 scales of a file of 0.1.4: its weight is float16 or float32, and they stay as they
  /// are.
  bool from_flat_scales(const State& s) const {
    if (model.dialect != "flashoptim" || s.leaves.size() != 2) return false;
    return s.stored_as.ends_with(versions_of(FlashFiles::kNew));
  }

  Status plain(const State& s) {
    const bool narrow = form.generation == FlashFiles::kOld && !form.compressed;
    StateReport* entry = report_of(report, param, s, narrow ? "bfloat16" : "float32", true);
    leaves.push_back(
        tensor_leaf(at(s.name), find_dtype(narrow ? "bfloat16" : "float32"), s.shape,
                    narrow ? bfloat16_source(s.values, entry) : float32_source(s.values)));
    return fine();
  }

  /// What is kept beside the weight; its width in bytes, or 0.
  Result<int> error_bits() {
    const State* beside = beside_of(param);
    if (beside == nullptr) return 0;
    const Leaf& from = raw_of(*beside);
    const std::string& key = beside->name;
    const bool wide = key.ends_with("_split16");
    if (!wide && !key.ends_with("_split8")) {
      RETURN_IF_ERROR(leave_out(param, *beside, "FlashOptim", wanted, report));
      return 0;
    }
    const bool bfloat16 = key.starts_with("param_bfloat16");
    Shape shape = from.shape;
    if (wide) shape.pop_back();
    leaves.push_back(
        tensor_leaf(at("error_bits"), find_dtype(bfloat16 ? "bfloat16" : "float16"), shape,
                    wide ? words_of_bytes(from.source) : floats_from(from.source, bfloat16)));
    return wide ? 4 : 3;
  }

  static std::shared_ptr<Source> floats_from(std::shared_ptr<Source> source, bool bfloat16) {
    return source_by([source = std::move(source), bfloat16, numbers = std::vector<int8_t>()](
                         uint64_t first, uint64_t count, void* out) mutable -> Status {
      const ScratchBuffer memory(numbers);
      numbers.resize(count);
      RETURN_IF_ERROR(source->read(first, count, numbers.data()));
      for (uint64_t i = 0; i < count; ++i) {
        const auto x = static_cast<float>(numbers[i]);
        const uint16_t word = bfloat16 ? bfloat16_nearest(x) : half_nearest(x);
        std::memcpy(static_cast<char*>(out) + 2 * i, &word, 2);
      }
      return fine();
    });
  }
};

/// `widths` has how many bytes are beside the weight of each parameter, -1 where nothing is kept.
Result<Settings> settings_for(const Model& model, const WeightDtypes& dtypes, const Group& group,
                              const std::vector<int>& widths) {
  const bool own = model.dialect == "flashoptim";
  Settings s = own ? group.settings : settings_elsewhere(group);
  int width = -1;
  const bool any = std::ranges::any_of(group.params, [&](size_t p) { return widths[p] > 0; });
  for (const size_t p : group.params) {
    if (!any || widths[p] < 0) continue;
    ASSIGN_OR_RETURN(dtype, dtypes.of(model.params[p]));
    // A float32 weight has nothing beside it whatever the group says.
    if (dtype != nullptr && dtype->bytes == 4) continue;
    if (width >= 0 && width != widths[p])
      return bad("FlashOptim keeps 8 or 16 bits beside all weights of a group, and here " +
                 shown(model.params[p]) + " has others than those before it");
    width = widths[p];
  }
  if (!has_setting(group, "initial_lr") && has_setting(group, "lr"))
    set_in(s, "initial_lr", *setting(group, "lr"));
  if (!own || !has_setting(group, "master_bytewidth") || width > 0)
    set_in(s, "master_bytewidth", Value::number(std::max(0, width)));
  if (!own || !has_setting(group, "quantize")) set_in(s, "quantize", Value::boolean(true));
  return s;
}

}  // namespace

Result<Document> write_flashoptim(const Model& model, const Wanted& wanted, DialectReport& report) {
  ASSIGN_OR_RETURN(form, form_of(wanted));
  RETURN_IF_ERROR(check_algorithm(model, "FlashOptim", {"adam", "lion", "sgd"}));
  if (model.flattened && form.compressed)
    return bad(
        "FlashOptim loads no compressed states from a flattened checkpoint; take "
        "--state-format float32");
  Document out = begun(model);
  const WeightDtypes dtypes{model, wanted.weights};
  std::vector<int> widths(model.params.size(), -1);
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Param& param = model.params[i];
    if (!param.known_shape && !param.states.empty()) return no_shape(param);
    FlashOptimWriter writer{model, dtypes, param, form, wanted, report, out.leaves};
    bool adam = false;
    for (const State& s : param.states) adam |= s.name == "exp_avg_sq";
    // Only its Adam counts steps.
    if (const Value* said = adam ? number_in(param, "step") : nullptr) {
      const bool whole = form.generation == FlashFiles::kNew;
      ASSIGN_OR_RETURN(step, whole_of(*said, shown(param) + ", step"));
      out.leaves.push_back(whole ? scalar_leaf(writer.at("step"), step)
                                 : scalar_leaf(writer.at("step"), static_cast<float>(step)));
    }
    for (const State& s : param.states) {
      if (&s != beside_of(param)) RETURN_IF_ERROR(writer.state(s));
    }
    ASSIGN_OR_RETURN(width, writer.error_bits());
    if (!param.states.empty()) widths[i] = width;
  }
  RETURN_IF_ERROR(add_groups(
      model, [&](const Group& group) { return settings_for(model, dtypes, group, widths); },
      out.leaves));
  out.leaves.insert(out.leaves.end(), model.rest.begin(), model.rest.end());
  return out;
}

}  // namespace lowbit::ckpt
