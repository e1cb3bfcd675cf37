#include "dialect/tree/other_rules.h"

#include <algorithm>

#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {
namespace {

/// What tells another optimizer.
struct Signature {
  const char* algorithm;          // its states have the names of this one's
  std::vector<const char*> keys;  // settings of its groups
  const char* optimizer;
  const char* without = nullptr;  // a setting that its groups do not have
  const char* off = nullptr;      // a setting that they have as False
  const char* number = nullptr;   // a number of its parameters
  const char* on = nullptr;       // a setting that its groups have as another than 0
};

/// The first that fits counts.
const std::vector<Signature>& signatures() {
  static const std::vector<Signature> all = {
      {"adam", {"grad_averaging", "trust_clip"}, "LAMB of timm"},
      {"adam", {"grad_averaging", "max_grad_norm"}, "FusedLAMB of Apex"},
      {"adam", {"max_coeff", "min_coeff"}, "FusedLamb of DeepSpeed"},
      {.algorithm = "adam",
       .keys = {},
       .optimizer = "LAMB of pytorch-lamb",
       .number = "trust_ratio"},
      {"adam", {"delta", "wd_ratio"}, "AdamP"},
      {"adam", {"final_lr", "gamma"}, "AdaBound"},
      {"adam", {"schedule_decay"}, "Nadam of timm"},
      {"adam", {"clip_exp"}, "ADOPT of timm"},
      {"adam", {"buffer"}, "RAdam of timm"},
      {.algorithm = "adam",
       .keys = {},
       .optimizer = "AdamW of transformers with correct_bias=False",
       .off = "correct_bias"},
      {"adam", {"momentum_decay"}, "NAdam"},
      {"adam", {"caution"}, "NAdamW of timm", "amsgrad"},
      {"adam", {"decoupled_weight_decay", "foreach"}, "RAdam", "amsgrad"},
      {"adam", {"rank", "update_proj_gap", "proj_type"}, "GaLore or APOLLO of their own packages"},
      {"lion", {"grad_averaging", "norm_type"}, "FusedNovoGrad of Apex"},
      {"lion", {"beta"}, "Tiger", "betas"},
      // A file from which states were left out. A Lion of bitsandbytes has eps=0.
      {"lion", {"amsgrad"}, "Adam without exp_avg_sq"},
      {.algorithm = "lion", .keys = {"betas"}, .optimizer = "Adam without exp_avg_sq", .on = "eps"},
      {"lion", {"beta2_decay"}, "Adafactor without second moments"},
      {.algorithm = "adam",
       .keys = {"t_beta3"},
       .optimizer = "AdEMAMix without exp_avg_slow",
       .on = "alpha"},
      {"sgd", {"alpha", "centered"}, "RMSprop without square_avg"},
      {"schedule_free", {"momentum"}, "SGDScheduleFree", "betas"},
      {"schedule_free", {"silent_sgd_phase"}, "RAdamScheduleFree"},
      {"sgd", {"trust_coeff"}, "LARS of timm"},
      {"rmsprop", {"lr_in_momentum"}, "RMSpropTF of timm"},
  };
  return all;
}

bool fits(const Signature& known, const Group& group) {
  const Value* off = known.off == nullptr ? nullptr : setting(group, known.off);
  if (known.off != nullptr && (off == nullptr || off->is_on())) return false;
  if (known.on != nullptr && !is_on(group, known.on)) return false;
  if (known.without != nullptr && setting(group, known.without) != nullptr) return false;
  return std::ranges::all_of(known.keys,
                             [&](const char* key) { return setting(group, key) != nullptr; });
}

bool fits(const Signature& known, const Model& model) {
  const bool numbered =
      known.number == nullptr || std::ranges::any_of(model.params, [&](const Param& p) {
        return std::ranges::any_of(p.numbers,
                                   [&](const auto& n) { return n.first == known.number; });
      });
  return numbered &&
         std::ranges::any_of(model.groups, [&](const Group& group) { return fits(known, group); });
}

}  // namespace

std::string other_rule(const std::string& algorithm, const Model& model) {
  for (const Signature& known : signatures()) {
    if (algorithm == known.algorithm && fits(known, model)) return known.optimizer;
  }
  return "";
}

}  // namespace lowbit::ckpt
