// adafactor-8bit's state dicts, of all five generations.
//
// <x>_q are codes of the flattened tensor filled up with zeros to whole blocks, <x>_scale a float32
// for each, <x>_shape what they were, <x>_pad how many zeros there are; x is row_var and col_var of
// a factored second moment, variance of one that is not. Which version wrote them the file does not
// say; it follows from keys and settings:
//
//   <x>_min_log                                0.4.0 and later
//   a step that is a float                     0.1.0 to 0.1.2
//   a setting m_block_size in the groups       0.2.1 to 0.3.1
//   none of these                              0.1.3 to 0.2.0, which divided by 255 twice: codes of
//                                              its CUDA kernels can be read, those of its fallback
//                                              are all 255
//
// Momentum (m_q, m_scale) has changed more often; see adafactor8bit_momentum.cpp.
#include "dialect/adafactor8bit/adafactor8bit.h"

#include <algorithm>
#include <map>
#include <set>

#include "dialect/adafactor8bit/rules.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "dialect/tree/weights.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<int> recognize_adafactor8bit(const Document& /*document*/, const OptimizerTree& tree) {
  for (const Entry& e : tree.params) {
    for (const char* mark : {"row_var_q", "variance_q", "v_low_q", "m_q", "is_quantized"}) {
      if (e.find(mark) != nullptr) return 3;
    }
  }
  for (const Group& g : tree.groups) {
    if (has_setting(g, "min_8bit_size") && has_setting(g, "scale_parameter")) return 3;
  }
  return 0;
}

struct Adafactor8bitReader : AdafactorEntry {
  Result<AdafactorFiles> files() const {
    for (const char* x : {"row_var", "col_var", "variance"}) {
      if (tensor_in(entry, std::string(x) + "_min_log") == nullptr) continue;
      const Leaf* q = tensor_in(entry, std::string(x) + "_q");
      const bool wide = q != nullptr && q->dtype->bytes == 2;
      return wide ? AdafactorFiles::kAdaptive16 : AdafactorFiles::kAdaptive8;
    }
    const Leaf* step = entry.find("step");
    if (step != nullptr && step->kind == Leaf::Kind::kValue && step->value.is(Value::Kind::kFloat))
      return AdafactorFiles::kLinear;
    return has_setting(group, "m_block_size") ? AdafactorFiles::kFixed : AdafactorFiles::kDivided;
  }

  /// Reads one of row_var, col_var, variance, under a name of torch's.
  Status second(const std::string& x, const std::string& name) {
    const Leaf* plain = tensor_in(entry, x);
    const Leaf* codes = tensor_in(entry, x + "_q");
    if (plain == nullptr && codes == nullptr) return fine();
    State s;
    if (plain != nullptr) {
      s = plain_state(name, *plain);
      ASSIGN_OR_RETURN(shape, squeezed(plain->shape, x));
      s.shape = std::move(shape);
    } else {
      s.name = name;
      ASSIGN_OR_RETURN(generation, files());
      RETURN_IF_ERROR(coded(s, x, *codes, generation));
    }
    s.is_signed = false;
    if (x == "variance") {
      param.learn(s.shape);
    }
    param.states.push_back(std::move(s));
    return fine();
  }

  /// row_var and conf_row are [.., R, 1], col_var and conf_col [.., 1, C].
  Result<Shape> squeezed(Shape shape, const std::string& x) const {
    const bool row = x.find("row") != std::string::npos, col = x.find("col") != std::string::npos;
    if ((!row && !col) || shape.size() < 2) return shape;
    const auto mean = shape.end() - (row ? 1 : 2);
    if (*mean != 1)
      return bad(what(x) + ": has the shape " + shape_text(shape) +
                 ", which is not that of means " +
                 (row ? "of rows, [.., R, 1]" : "of columns, [.., 1, C]"));
    shape.erase(mean);
    return shape;
  }

  Status coded(State& s, const std::string& x, const Leaf& codes, AdafactorFiles files) {
    const std::string name = x + "_q";
    const bool adaptive =
        files == AdafactorFiles::kAdaptive8 || files == AdafactorFiles::kAdaptive16;
    const bool wide = files == AdafactorFiles::kAdaptive16;
    ASSIGN_OR_RETURN(q, intact(name, wide ? "int16" : "uint8", wide ? "uint16" : "uint8"));
    ASSIGN_OR_RETURN(scale, intact(x + "_scale", "float32"));
    const auto shape = shape_in(entry, x + "_shape");
    if (!shape) return bad(what(x + "_shape") + ": is not a shape");
    ASSIGN_OR_RETURN(count, elements(*shape, what(x + "_shape")));
    const uint64_t stored = volume(codes.shape), blocks = volume(scale->shape);
    if (blocks == 0 || stored % blocks != 0 || stored < count || stored - count >= stored / blocks)
      return bad(what(x) + ": " + std::to_string(stored) + " codes and " + std::to_string(blocks) +
                 " scales do not belong to a tensor of shape " + shape_text(*shape));
    BlockLayout layout{
        .count = count, .block = static_cast<int64_t>(stored / blocks), .bits = wide ? 16 : 8};
    std::vector<std::shared_ptr<Floats>> numbers = {floats_of(*scale)};
    s.leaves = {q, scale};
    if (adaptive) {
      ASSIGN_OR_RETURN(minimum, intact(x + "_min_log", "float32"));
      if (volume(minimum->shape) != blocks)
        return bad(what(x + "_min_log") + ": has " + std::to_string(volume(minimum->shape)) +
                   " numbers for " + std::to_string(blocks) + " blocks");
      numbers.push_back(floats_of(*minimum));
      s.leaves.push_back(minimum);
    } else {
      RETURN_IF_ERROR(recoverable(x, *q, *scale, layout, files));
    }
    ASSIGN_OR_RETURN(kept, squeezed(*shape, x));
    s.shape = std::move(kept);
    for (const Leaf* leaf : s.leaves) s.bytes += leaf->bytes();
    s.stored_as = std::string("adafactor-8bit of ") + versions_of(files) + ", blocks of " +
                  std::to_string(layout.block);
    s.values = block_floats(second_moment_rule(files), layout, q->source, numbers);
    // The codes of two generations are also lowbit's.
    if (adaptive || files == AdafactorFiles::kFixed)
      s.codes =
          codes_of_rows(s.shape,
                        wide       ? "log16"
                        : adaptive ? "log8"
                                   : "log8_fixed",
                        layout.bits, layout.block, wide ? bytes_of_words(q->source) : q->source,
                        adaptive ? interleaved(numbers[0], numbers[1]) : scale->source);
    return fine();
  }

  /// Whether the first block can be what that generation wrote, and says more than its largest
  /// value.
  Status recoverable(const std::string& x, const Leaf& q, const Leaf& scale,
                     const BlockLayout& layout, AdafactorFiles files) const {
    float s = 0;
    RETURN_IF_ERROR(floats_of(scale)->read(0, 1, &s));
    const std::string guess =
        std::string("by its keys this is a file of adafactor-8bit ") + versions_of(files);
    if (files == AdafactorFiles::kDivided && s > 1.0f)
      return bad(what(x + "_scale") + ": is " + std::to_string(s) + "; " + guess +
                 ", whose scales are below 1, so its generation cannot be told");
    if (files != AdafactorFiles::kDivided) return fine();
    const uint64_t n = std::min<uint64_t>(layout.count, static_cast<uint64_t>(layout.block));
    std::vector<uint8_t> first(n);
    RETURN_IF_ERROR(q.source->read(0, n, first.data()));
    const auto full = static_cast<uint64_t>(std::ranges::count(first, 255));
    const auto zero = static_cast<uint64_t>(std::ranges::count(first, 0));
    if (full > 1 && full + zero == n)
      return bad(
          what(x + "_q") + ": " + guess +
          ", written by its fallback without CUDA, which divides by 255 twice: every code is "
          "255, only the largest value of a block is left, and the state cannot be recovered");
    return fine();
  }
};

bool has_any(const Entry& entry, const std::string& x) {
  return entry.find(x) != nullptr || entry.find(x + "_q") != nullptr;
}

/// The name of a group's second moments. Those by elements beside momentum and fixed steps are of
/// its AdamW, unless a setting is that of an Adafactor.
std::string second_of(const Group& group, const OptimizerTree& tree) {
  const auto any = [&](const std::string& x) {
    return std::ranges::any_of(group.params, [&](size_t p) { return has_any(tree.params[p], x); });
  };
  const Value* beta3 = setting(group, "beta3");
  if (any("conf_row") || (beta3 != nullptr && !beta3->is(Value::Kind::kNone))) return "exp_avg_sq";
  const bool adafactor = any("row_var") || is_on(group, "relative_step") ||
                         is_on(group, "factored") || is_on(group, "scale_parameter");
  return any("m") && !adafactor ? "exp_avg_sq" : "variance";
}

/// Low-rank state decides eps[0] of its group in lowbit, also for the others there.
void warn_of_eps(Model& model, const Group& group, const OptimizerTree& tree) {
  const bool alone =
      std::ranges::all_of(group.params, [&](size_t p) { return is_low_rank(tree.params[p]); });
  const Value* eps = setting(group, "eps");
  const bool says =
      eps != nullptr && eps->items.size() == 2 && !eps->items[0].is(Value::Kind::kNone);
  const bool usual = real_setting(group, "apollo_eps").value_or(1e-8) == 1e-8;
  if (alone || (!says && usual)) return;
  model.warnings.push_back("a group with low-rank state takes eps[0]=" +
                           std::string(usual ? "None" : "the root of apollo_eps") +
                           " for it, and its other parameters lose their own eps[0]; give those a "
                           "group of their own");
}

bool is_none(const Value* said) { return said == nullptr || said->is(Value::Kind::kNone); }

/// Why no other optimizer takes the next steps of a group; "" where one does. Files of 0.1.9 and
/// before, which have none of these settings, are what lowbit.Adafactor was made by.
std::string own_step(const Model& model, const Group& group) {
  const bool first = !is_none(setting(group, "beta1")), fixed = !is_none(setting(group, "beta2"));
  const bool relative = is_on(group, "relative_step");
  const bool adam = model.algorithm == "adam";
  if (!first || !is_none(setting(group, "beta3")) || !(adam || model.algorithm == "adafactor"))
    return "";
  const Value* corrected = setting(group, "bias_correction");
  const bool elementwise = !is_on(group, "factored") && fixed;  // it divides as Adam does
  if (corrected != nullptr && !relative) {
    const bool theirs = is_none(corrected) ? elementwise : corrected->is_on();
    if (theirs != (adam || fixed))
      return "bias_correction is " + value_text(*corrected) + ", so its means are " +
             (theirs ? "" : "not ") + "corrected, and those of others " +
             (theirs ? "are not" : "are");
    if (theirs && !adam && is_on(group, "weight_decay") && is_on(group, "scale_weight_decay"))
      return "its weight decay is corrected as its means are (scale_weight_decay), and that of "
             "others is not";
  }
  const Value* normalized = setting(group, "momentum_only_1d");
  if (normalized == nullptr || (is_none(normalized) ? elementwise : !normalized->is_on()))
    return "";
  for (const size_t i : group.params) {
    bool mean = false, full = false;
    for (const State& s : model.params[i].states) {
      mean |= s.name == "exp_avg";
      full |= s.name == "variance" || s.name == "exp_avg_sq";
    }
    if (mean && full)
      return "the momentum of " + shown(model.params[i]) +
             " is one of normalized gradients (momentum_only_1d), and that of others one of "
             "gradients";
  }
  return "";
}

/// The settings as other libraries have them. `eps` is a pair here, of which Adam has the first,
/// and a beta2 takes the place of beta2_decay.
void translate(Model& model, Group& group) {
  Settings& all = group.settings;
  if (model.algorithm == "adafactor" && is_none(setting(group, "beta2_decay")))
    take_from(all, "beta2_decay");
  if (model.algorithm != "adam") return;
  const auto first = real_setting(group, "beta1"), second = real_setting(group, "beta2");
  if (first && second)
    set_in(all, "betas", Value::tuple({Value::floating(*first), Value::floating(*second)}));
  const Value* eps = setting(group, "eps");
  if (eps == nullptr || eps->items.size() != 2) return;
  const Value said = eps->items[0];
  take_from(all, "eps");
  if (!said.is(Value::Kind::kNone)) set_in(all, "eps", said);
}

}  // namespace

Result<const Leaf*> AdafactorEntry::intact(const std::string& name, const char* dtype,
                                           const char* other) const {
  const Leaf* leaf = tensor_in(entry, name);
  if (leaf == nullptr) return bad(what(name) + ": is missing");
  const std::string_view found = leaf->dtype->name;
  if (found != dtype && found != other)
    return bad(what(name) + ": is " + std::string(found) + ", not " + dtype +
               ": torch's load_state_dict has cast it to the weight's type, which adafactor-8bit "
               "before 0.4.5 lets it; the state cannot be recovered");
  return leaf;
}

Result<Model> read_adafactor8bit(std::shared_ptr<const Document> document,
                                 const OptimizerTree& tree) {
  Model model = model_of(tree, "adafactor8bit", document);
  const std::vector<const Group*> group_of = groups_by_param(model);
  bool seed_counter = false;
  int64_t low_rank = 0;
  const Param* without_shape = nullptr;  // the first that may have a seed of lowbit's
  std::set<const Group*> warned;
  std::map<const Group*, std::string> seconds;
  for (const Leaf& leaf : model.rest)
    seed_counter |= !leaf.path.empty() && leaf.path.back().text() == "_apollo_seed_counter";
  const Weights weights(*document, tree);
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Entry& entry = tree.params[i];
    Param& param = model.params[i];
    ASSIGN_OR_RETURN(weight, weights.find(param.name, Weights::Asked::kShape));
    if (weight != nullptr) param.learn(weight->shape);
    for (const auto& [name, leaf] : entry.leaves) {
      if (name.starts_with("lag_") || name == "fira_prev_norm")
        model.warnings.push_back(shown(param) + ": " + printable(name) + " is left out");
    }
    const Group& group = *group_of[i];
    if (is_low_rank(entry)) {
      if (without_shape != nullptr) return no_shape(*without_shape);
      RETURN_IF_ERROR(read_low_rank({entry, param, group, seed_counter}, low_rank++));
      if (warned.insert(&group).second) warn_of_eps(model, group, tree);
      RETURN_IF_ERROR(read_step(entry, param));
      continue;
    }
    Adafactor8bitReader reader{{entry, param, group, seed_counter}};
    std::string& second = seconds[&group];
    if (second.empty()) second = second_of(group, tree);
    RETURN_IF_ERROR(reader.second("row_var", second + "_row"));
    RETURN_IF_ERROR(reader.second("col_var", second + "_col"));
    RETURN_IF_ERROR(reader.second("variance", second));
    RETURN_IF_ERROR(reader.second("conf_row", "exp_avg_res_row"));
    RETURN_IF_ERROR(reader.second("conf_col", "exp_avg_res_col"));
    if (has_any(entry, "row_var") && param.states.size() >= 2) {
      Shape shape = param.states[0].shape;
      if (!param.states[1].shape.empty()) shape.push_back(param.states[1].shape.back());
      param.learn(std::move(shape));
    }
    RETURN_IF_ERROR(read_momentum(reader, "exp_avg"));
    if (has_any(entry, "m"))
      std::rotate(param.states.begin(), param.states.end() - 1, param.states.end());
    RETURN_IF_ERROR(read_step(entry, param));
    // That package gives out seeds at first gradients, and lowbit to every matrix with a rank.
    const Value* rank = setting(group, "apollo_rank");
    if (rank == nullptr || !rank->is(Value::Kind::kInt) || rank->integer <= 0) continue;
    if (!param.known_shape && without_shape == nullptr) without_shape = &param;
    if (param.known_shape && param.shape.size() >= 2) ++low_rank;
  }
  model.algorithm = algorithm_of(model);
  for (Group& group : model.groups) {
    const std::string why = own_step(model, group);
    if (model.refusal.empty() && !why.empty())
      model.refusal = "its optimizer of adafactor-8bit cannot continue in another: " + why +
                      "; continue with it, or start a new optimizer from the weights";
    translate(model, group);
  }
  return model;
}

constexpr KeptSetting kKeptByAdafactor8bit[] = {{"adam", "maximize"},
                                                {"came", "maximize"},
                                                {"adafactor", "maximize"},
                                                {"adafactor", "beta1"},
                                                {"adafactor", "beta2"},
                                                {"adafactor", "relative_step"},
                                                {"adafactor", "scale_parameter"},
                                                {"adafactor", "decay_by"},
                                                {"adafactor", "factored"},
                                                {"adafactor", "fira_margin"},
                                                {"adafactor", "scale_weight_decay"}};

extern const Dialect kAdafactor8bit;
const Dialect kAdafactor8bit = {
    "adafactor8bit",
    "adafactor-8bit: logarithmic 8-bit second moments",
    recognize_adafactor8bit,
    read_adafactor8bit,
    write_adafactor8bit,
    kKeptByAdafactor8bit,
    {.always_decoupled = true, .coupled = "adafactor-8bit decouples it"}};

}  // namespace lowbit::ckpt
