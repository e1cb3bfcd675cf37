// The dialect of the Adafactor of transformers (5.23, optimization.py) and of fairseq, whose update
// is the same:
//
//   state.<i>  exp_avg_sq_row, exp_avg_sq_col: means of the squared gradient plus eps[0]; of
//              vectors exp_avg_sq; step; RMS, the weight's root mean square, measured in each step;
//              exp_avg, a mean of updates, where beta1 is given
//   group      lr, eps (a pair), clip_threshold, decay_rate, beta1, weight_decay, scale_parameter,
//              relative_step, warmup_init
//
// lowbit.Adafactor takes the same step with add_eps=True and decay_by="alpha".
#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/model/formats.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr double kRelativeLimit = 1e-2;  // of a relative step without warm-up
constexpr int64_t kWarmUp = 10'000;      // steps after which 1e-6 * step is above 1 / sqrt(step)

Result<int> recognize_transformers(const Document& /*document*/, const OptimizerTree& tree) {
  if (tree.groups.empty()) return 0;
  for (const Group& group : tree.groups) {
    for (const char* name :
         {"clip_threshold", "decay_rate", "scale_parameter", "relative_step", "warmup_init"}) {
      if (!has_setting(group, name)) return 0;
    }
    // timm's has a single eps, and adafactor-8bit settings of its own.
    const Value* eps = setting(group, "eps");
    if (eps == nullptr || eps->items.size() != 2 || has_setting(group, "min_8bit_size")) return 0;
  }
  return std::ranges::any_of(tree.params,
                             [](const Entry& entry) {
                               return tensor_in(entry, "exp_avg_sq") != nullptr ||
                                      tensor_in(entry, "exp_avg_sq_row") != nullptr;
                             })
             ? 3
             : 0;
}

Error wrong(const Param& param, const std::string& what) {
  return bad(shown(param) + ": " + what + ", which Adafactor of transformers does not write");
}

Status read_param(const Entry& entry, Param& param) {
  const Leaf *row = tensor_in(entry, "exp_avg_sq_row"), *col = tensor_in(entry, "exp_avg_sq_col"),
             *full = tensor_in(entry, "exp_avg_sq");
  if ((row == nullptr) != (col == nullptr) || (row != nullptr && full != nullptr))
    return wrong(param, "has one of exp_avg_sq_row and exp_avg_sq_col alone, or exp_avg_sq too");
  if (row != nullptr) {
    const Shape &r = row->shape, &c = col->shape;
    if (r.empty() || r.size() != c.size() || !std::equal(r.begin(), r.end() - 1, c.begin()))
      return wrong(param, "exp_avg_sq_row has the shape " + shape_text(r) + " and exp_avg_sq_col " +
                              shape_text(c));
    param.learn(shape_of_means(r, c));
    param.states.push_back(plain_state("variance_row", *row));
    param.states.push_back(plain_state("variance_col", *col));
  }
  if (full != nullptr) {
    if (full->shape.size() > 1)
      return wrong(param, "exp_avg_sq has the shape " + shape_text(full->shape));
    param.learn(full->shape);
    param.states.push_back(plain_state("variance", *full));
  }
  for (State& s : param.states) s.is_signed = false;
  if (const Leaf* mean = tensor_in(entry, "exp_avg"))
    param.states.push_back(plain_state("exp_avg", *mean));
  return read_step(entry, param);
}

/// Why lowbit.Adafactor does not step as a group did; "" where it does.
Result<std::string> refusal(const Model& model, const Group& group,
                            std::vector<std::string>& warnings) {
  if (has_setting(group, "rank") && has_setting(group, "proj_type"))
    return std::string(
        "it is GaLore's, whose states are of gradients in a subspace; continue with that "
        "optimizer, or start a new one from the weights");
  const Value* beta1 = setting(group, "beta1");
  const bool mean = std::ranges::any_of(group.params, [&](size_t i) {
    const auto& states = model.params[i].states;
    return !states.empty() && states.back().name == "exp_avg";
  });
  if (mean || (beta1 != nullptr && !beta1->is(Value::Kind::kNone)))
    return std::string(
        "beta1 is given: its exp_avg is a mean of updates, after clipping and the learning rate, "
        "and that of lowbit.Adafactor one of gradients");
  const double clip = real_setting(group, "clip_threshold").value_or(1);
  if (!(clip >= 1))
    return "clip_threshold is " + std::to_string(clip) + ", and d of lowbit.Adafactor at least 1";
  const double decay = real_setting(group, "decay_rate").value_or(-0.8);
  if (!(decay <= 0))
    return "decay_rate is " + std::to_string(decay) +
           ", and beta2_decay of lowbit.Adafactor at most 0";
  if (!is_on(group, "warmup_init")) return std::string();
  for (const size_t i : group.params) {
    const Param& p = model.params[i];
    const Value* said = number_in(p, "step");
    if (p.states.empty() || said == nullptr) {
      warnings.push_back(shown(p) +
                         " has made no step, and warmup_init is True: in lowbit.Adafactor its "
                         "first steps are as large as later ones");
      continue;
    }
    ASSIGN_OR_RETURN(step, whole_of(*said, shown(p) + ": step"));
    if (step + 1 < kWarmUp)
      return "warmup_init is True and " + shown(p) + " has made " + std::to_string(step) +
             " steps: in the first " + std::to_string(kWarmUp) +
             " the step size rises, for which lowbit.Adafactor has no option";
  }
  return std::string();
}

/// The settings under lowbit.Adafactor's names.
void translate(Group& group) {
  Settings& all = group.settings;
  const auto moved = [&](const char* from, const char* to) {
    if (auto value = take_from(all, from)) set_in(all, to, std::move(*value));
  };
  moved("clip_threshold", "d");
  moved("decay_rate", "beta2_decay");
  take_from(all, "warmup_init");
  if (is_on(group, "relative_step")) {  // its lr is None, or a schedule's, and not used
    set_in(all, "lr", Value::floating(kRelativeLimit));
    std::erase_if(group.tensors, [](const auto& t) { return t.first[0].text() == "lr"; });
  }
  for (auto& [path, leaf] : group.tensors) {
    if (path[0].text() == "clip_threshold") path[0] = "d";
    if (path[0].text() == "decay_rate") path[0] = "beta2_decay";
  }
  set_in(all, "add_eps", Value::boolean(true));
  set_in(all, "decay_by", Value::words("alpha"));
}

Result<Model> read_transformers(std::shared_ptr<const Document> document,
                                const OptimizerTree& tree) {
  Model model = model_of(tree, "transformers", std::move(document));
  for (size_t i = 0; i < model.params.size(); ++i)
    RETURN_IF_ERROR(read_param(tree.params[i], model.params[i]));
  for (Group& group : model.groups) {
    ASSIGN_OR_RETURN(why, refusal(model, group, model.warnings));
    if (model.refusal.empty() && !why.empty())
      model.refusal = "its Adafactor of transformers cannot continue in lowbit: " + why;
    translate(group);
  }
  model.only_for = "lowbit";
  model.algorithm = algorithm_of(model);
  return model;
}

}  // namespace

extern const Dialect kTransformers;
const Dialect kTransformers = {"transformers", "Adafactor of transformers and fairseq; read only",
                               recognize_transformers, read_transformers, nullptr};

}  // namespace lowbit::ckpt
