#include "dialect/deepspeed/universal.h"

#include <algorithm>
#include <optional>
#include <set>

#include "container/deepspeed/model_states.h"
#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/floats.h"
#include "dialect/numbers/numbers.h"
#include "dialect/tree/optimizer_tree.h"
#include "dialect/tree/weights.h"
#include "io/read/file.h"
#include "io/text.h"
#include "policy/names.h"

namespace lowbit::ckpt {
namespace {

// The layout is that of this version, which loaders ask for.
constexpr const char* kVersion = "0.19.8";
constexpr int64_t kMaxSteps = 1 << 24;  // that float32 counts one by one

/// The leaf at another place, read through its source alone.
Leaf moved(const Leaf& leaf, Path path) {
  Leaf out = leaf;
  out.path = std::move(path);
  out.stored = nullptr;
  out.blob = nullptr;
  return out;
}

class Universal {
 public:
  Universal(const Document& document, const OptimizerTree& tree, std::vector<std::string>& warnings)
      : document_(document), tree_(tree), weights_(document, tree), warnings_(warnings) {}

  Result<std::vector<FolderFile>> files() {
    if (tree_.groups.empty())
      return bad("has no parameter groups, which a Universal Checkpoint needs");
    for (const Entry& entry : tree_.params) RETURN_IF_ERROR(add_param(entry));
    size_t grouped = 0;
    for (const Group& group : tree_.groups) grouped += group.params.size();
    if (!step_ || grouped != tree_.params.size())
      return bad(
          "has parameters in no group, or none, where a Universal Checkpoint has all in "
          "groups");
    FolderFile common{"zero/optimizer_state.pt", {}};
    common.document.leaves.push_back(value_leaf({"ds_version"}, Value::words(kVersion)));
    add_groups({"param_groups"}, common.document);
    // Where stage 3 looks for them.
    common.document.leaves.push_back(
        scalar_leaf({"optimizer_state_dict", "state", Key(Key::Kind::kNumber, 0), "step"},
                    static_cast<float>(*step_)));
    add_groups({"optimizer_state_dict", "param_groups"}, common.document);
    add_loss_scaler(common.document);
    files_.push_back(std::move(common));
    RETURN_IF_ERROR(add_models());
    return std::move(files_);
  }

 private:
  Status add_param(const Entry& entry) {
    if (entry.name.empty())
      return bad(
          "numbers its parameters, and a Universal Checkpoint has them by name; give the "
          "model's state dict as --model PATH");
    const std::string name = printable(entry.name);
    if (!is_entry_name(entry.name) || entry.name == "optimizer_state.pt" || entry.name.size() > 200)
      return bad(name +
                 ": is not a folder name, which a Universal Checkpoint has for each "
                 "parameter");
    ASSIGN_OR_RETURN(weight, weights_.find(entry.name, Weights::Asked::kValues));
    if (weight == nullptr || weight->source == nullptr)
      return bad(name +
                 ": the checkpoint has no weight of that name, of which a Universal "
                 "Checkpoint holds the float32 values; give the one with its weights as --model "
                 "PATH");
    add(entry.name, "fp32",
        is_float32(*weight) ? moved(*weight, {"param"})
                            : tensor_leaf({"param"}, find_dtype("float32"), weight->shape,
                                          float32_source(floats_of(*weight))));
    if (first_ == nullptr) first_ = weight;
    used_.insert(weight);
    shapes_.push_back(weight->shape);
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      const Leaf* leaf = entry.find(state);
      if (leaf == nullptr)
        return bad(name + ": has no " + state +
                   "; a Universal Checkpoint holds Adam's two "
                   "moments of every parameter");
      if (!is_float32(*leaf) || leaf->shape != weight->shape)
        return bad(name + ": its " + state + " is not a float32 tensor of the weight's shape " +
                   shape_text(weight->shape));
      add(entry.name, state, moved(*leaf, {"param"}));
    }
    for (const auto& [key, leaf] : entry.leaves) {
      if (key != "exp_avg" && key != "exp_avg_sq" && key != "step")
        return bad(name + ": its state " + printable(key) +
                   " has no place in a Universal Checkpoint");
    }
    return add_step(entry);
  }

  Status add_step(const Entry& entry) {
    const Leaf* leaf = entry.find("step");
    if (leaf == nullptr) return bad(printable(entry.name) + ": has no step");
    ASSIGN_OR_RETURN(number, number_of(*leaf));
    ASSIGN_OR_RETURN(step, whole_of(number, printable(entry.name) + ": step"));
    if (step < 0 || step > kMaxSteps)
      return bad(printable(entry.name) + ": " + std::to_string(step) +
                 " is not a number of steps that float32 holds, in which step.pt is");
    // DeepSpeed steps all parameters at once, and stage 3 loads one count.
    if (step_ && *step_ != step)
      return bad(printable(entry.name) + ": was stepped " + std::to_string(step) +
                 " times and others " + std::to_string(*step_) +
                 ", where DeepSpeed has one count for all");
    step_ = step;
    FolderFile file{"zero/" + entry.name + "/step.pt", {}};
    file.document.leaves.push_back(scalar_leaf({}, static_cast<float>(step)));
    files_.push_back(std::move(file));
    return fine();
  }

  void add(const std::string& param, const std::string& state, Leaf leaf) {
    FolderFile file{"zero/" + param + "/" + state + ".pt", {}};
    file.document.leaves.push_back(value_leaf({"cat_dim"}, Value::number(0)));
    file.document.leaves.push_back(std::move(leaf));
    files_.push_back(std::move(file));
  }

  /// The dynamic loss scale, as the object that DeepSpeed keeps it in.
  void add_loss_scaler(Document& to) {
    Value attributes{.kind = Value::Kind::kDict};
    for (const Leaf* leaf : tree_.rest) {
      const Path& path = leaf->path;
      if (path.size() != 4 || path[0].text() != "deepspeed" || path[1].text() != "optimizer" ||
          path[2].text() != "loss_scaler" || leaf->kind != Leaf::Kind::kValue)
        continue;
      attributes.set(path[3].text(), leaf->value);
      used_.insert(leaf);
    }
    if (attributes.items.empty()) return;
    std::string missing;
    for (const char* name :
         {"cur_scale", "dynamic", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
          "min_scale", "delayed_shift", "cur_hysteresis", "consecutive_hysteresis",
          "raise_error_at_min_scale", "dtype"}) {
      if (attributes.find(name) == nullptr)
        missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
    if (!missing.empty()) {
      warnings_.push_back("deepspeed.optimizer.loss_scaler is left out: it lacks " + missing +
                          ", which DeepSpeed " + kVersion + " needs");
      return;
    }
    Value scaler{.kind = Value::Kind::kOpaque, .integer = Value::kMade, .text = kLossScaler};
    scaler.items.push_back(std::move(attributes));
    to.leaves.push_back(value_leaf({"loss_scaler"}, std::move(scaler)));
    to.leaves.push_back(value_leaf({"dynamic_loss_scale"}, Value::boolean(true)));
  }

  void add_groups(const Path& at, Document& to) const {
    for (size_t g = 0; g < tree_.groups.size(); ++g) {
      for (const auto& [key, value] : tree_.groups[g].settings) {
        if (key != "param_names") to.leaves.push_back(value_leaf(below(at, place(g), key), value));
      }
      to.leaves.push_back(value_leaf(below(at, place(g), "params"),
                                     Value::list({Value::number(static_cast<int64_t>(g))})));
    }
  }

  /// Stages 1 and 2 look for the one name, stage 3 for the other.
  Status add_models() {
    Document model;
    ASSIGN_OR_RETURN(module, add_module(model));
    Value names = Value::list({});
    for (const std::string& name : module) names.items.push_back(Value::words(name));
    for (size_t g = 0; g < tree_.groups.size(); ++g) {
      if (tree_.groups[g].params.empty())
        model.leaves.push_back(
            value_leaf({"param_shapes", place(g)}, Value{.kind = Value::Kind::kDict}));
      for (const size_t p : tree_.groups[g].params) {
        model.leaves.push_back(
            value_leaf({"param_shapes", place(g), tree_.params[p].name}, size_value(shapes_[p])));
      }
    }
    const auto say = [&](const char* key, Value value) {
      const bool known =
          std::ranges::any_of(model.leaves, [&](const Leaf& l) { return l.path[0].text() == key; });
      if (!known) model.leaves.push_back(value_leaf({key}, std::move(value)));
    };
    say("module", Value{.kind = Value::Kind::kOrdered});
    say("buffer_names", std::move(names));
    say("optimizer", Value::none());
    say("frozen_param_shapes", Value::none());
    say("shared_params", Value{.kind = Value::Kind::kDict});
    say("frozen_param_fragments", Value::none());
    say("lr_scheduler", Value::none());
    say("skipped_steps", Value::number(0));
    say("global_steps", Value::number(*step_));
    say("dp_world_size", Value::number(1));
    say("mp_world_size", Value::number(1));
    say("ds_config", Value{.kind = Value::Kind::kDict});
    say("ds_version", Value::words(kVersion));
    model.leaves.push_back(value_leaf({"universal_checkpoint_info", "universal_checkpoint_version"},
                                      Value::floating(0.2)));
    files_.push_back({"mp_rank_00_model_states.pt", model});
    // DeepSpeed loads no module from either, and one may be large: the other file goes without.
    std::erase_if(model.leaves, [](const Leaf& l) { return l.path[0].text() == "module"; });
    model.leaves.push_back(value_leaf({"module"}, Value{.kind = Value::Kind::kOrdered}));
    files_.push_back({"zero_pp_rank_0_mp_rank_00_model_states.pt", std::move(model)});
    return fine();
  }

  /// The tensors beside the weights: buffers, frozen parameters; and what DeepSpeed had kept with
  /// them.
  Result<std::set<std::string>> add_module(Document& model) {
    std::set<std::string> names, lost;
    const Path parent(first_->path.begin(), first_->path.end() - 1);
    for (const Leaf* leaf : tree_.rest) {
      const Path& path = leaf->path;
      if (used_.contains(leaf)) continue;
      const bool tensor = leaf->kind == Leaf::Kind::kTensor && leaf->source != nullptr;
      const bool beside = path.size() == parent.size() + 1 && is_below(path, parent);
      if (path.size() > 1 && path[0].text() == "deepspeed" && !is_bookkeeping(path[1].text()) &&
          leaf->kind != Leaf::Kind::kSubclass) {
        if (path[1].text() != "ds_version")
          model.leaves.push_back(moved(*leaf, Path(path.begin() + 1, path.end())));
      } else if (tensor && beside) {
        const std::string name = path.back().text();
        model.leaves.push_back(moved(*leaf, {"module", name}));
        names.insert(name);
      } else {
        const bool part = path.size() > 1 && path[0].text() == "deepspeed";
        lost.insert(part ? flat_name({path[0], path[1]}) : path.empty() ? "" : path[0].text());
      }
    }
    RETURN_IF_ERROR(add_beside_model(model, names));
    std::string text;
    for (const std::string& key : lost) text += (text.empty() ? "" : ", ") + printable(key);
    if (!lost.empty())
      warnings_.push_back("left out, since a Universal Checkpoint has no place for it: " + text);
    return names;
  }

  /// The same of --model, which is there for its weights: what it has elsewhere is none of it.
  Status add_beside_model(Document& model, std::set<std::string>& names) const {
    if (document_.model == nullptr) return fine();
    std::set<std::string> params;
    const Leaf* weight = nullptr;
    for (const Entry& entry : tree_.params) {
      params.insert(clean_name(entry.name));
      if (weight != nullptr) continue;
      ASSIGN_OR_RETURN(found, weights_.find_in_model(entry.name, Weights::Asked::kValues));
      weight = found;
    }
    if (weight == nullptr) return fine();
    const Path parent(weight->path.begin(), weight->path.end() - 1);
    for (const Leaf& leaf : document_.model->leaves) {
      const bool beside = leaf.path.size() == parent.size() + 1 && is_below(leaf.path, parent);
      if (!beside || leaf.kind != Leaf::Kind::kTensor || leaf.source == nullptr) continue;
      const std::string name = leaf.path.back().text();
      if (params.contains(clean_name(name)) || !names.insert(name).second) continue;
      model.leaves.push_back(moved(leaf, {"module", name}));
    }
    return fine();
  }

  const Document& document_;
  const OptimizerTree& tree_;
  Weights weights_;
  std::vector<std::string>& warnings_;
  std::vector<FolderFile> files_;
  std::set<const Leaf*> used_;
  std::vector<Shape> shapes_;    // of the weights, as in tree_.params
  const Leaf* first_ = nullptr;  // of the weights
  std::optional<int64_t> step_;
};

}  // namespace

Result<std::vector<FolderFile>> universal_files(const Document& document,
                                                std::vector<std::string>& warnings) {
  ASSIGN_OR_RETURN(tree, optimizer_tree_of(document));
  return Universal(document, tree, warnings).files();
}

}  // namespace lowbit::ckpt
