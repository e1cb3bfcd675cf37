// What a *_model_states.pt of DeepSpeed tells: the module, and names and shapes of what ZeRO
// flattens.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "container/deepspeed/parts.h"

namespace lowbit::ckpt {

/// The names and shapes of one flat vector, in its order.
using FlatGroup = std::vector<std::pair<std::string, Shape>>;

struct ModelStates {
  std::vector<FlatGroup> groups;
  FlatGroup frozen;                                         // what no optimizer has
  std::vector<std::pair<std::string, std::string>> shared;  // a tied name, and the one that is kept
  std::set<std::string> buffers;
  int64_t ranks = 1;  // that ZeRO cut vectors for
};

Result<ModelStates> read_model_states(const PartFile& file);

/// The module's tensors under `model`, without those of `known` and those that are tied to one.
/// `placeholders`: an empty tensor stands for a parameter, as in stage 3, and is an error; buffers
/// and a module's extra state (Transformer Engine's) may be empty by themselves.
Status add_module(Parts& parts, Manifest& manifest, const PartFile& file, const ModelStates& states,
                  const std::set<std::string>& known, bool placeholders);

/// The frozen parameters of stage 3 and the names tied to them, under `model`: each rank's
/// model_states.pt has its slice. Their names are added to `known`.
Status add_frozen(Parts& parts, Manifest& manifest, const ModelStates& states,
                  std::set<std::string>& known);

/// Whether a key of the file is what ZeRO and the engine keep for themselves: it says how the files
/// are cut, or is empty.
bool is_bookkeeping(const std::string& key);
/// What else the file has, such as a learning rate's schedule and what the user saved, under
/// `deepspeed`.
Status add_rest(Parts& parts, Manifest& manifest, const PartFile& file);

/// The class of the dynamic loss scale of runs in float16.
inline constexpr const char* kLossScaler = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler";
/// Its attributes as plain values, under `deepspeed.optimizer.loss_scaler`, where nothing of the
/// user's can lie; nothing where the scale is fixed.
Status add_loss_scaler(Parts& parts, Manifest& manifest, const PartFile& file);

/// The warning where no file tells how DeepSpeed's own Adam decayed weights.
inline constexpr const char* kDecayNotSaved =
    "whether weight decay was decoupled (adam_w_mode) is not saved: ds_config is a path, or names "
    "no optimizer, or DeepSpeed before 0.19.1 removed adam_w_mode from it. Where a target must "
    "know, convert takes it for decoupled; if it was not, convert --to torch, set "
    "decoupled_weight_decay=False in the groups of that file, and convert it";
/// The parameter groups of an optimizer's state dict, under `optim`: settings as they are, and the
/// names of the parameters in each of the flat vectors that a group numbers. DeepSpeed's own Adam
/// does not keep `decoupled_weight_decay`: the configuration in `model` tells it.
Status add_param_groups(Parts& parts, Manifest& manifest, const PartFile& file, const Path& groups,
                        const std::vector<FlatGroup>& flat, const PartFile& model);

/// The path of a parameter's state.
inline Path state_path_of(const std::string& param, const std::string& state) {
  return {"optim", "state", param, state};
}

}  // namespace lowbit::ckpt
