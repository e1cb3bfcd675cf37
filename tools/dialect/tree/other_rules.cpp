#include "dialect/tree/other_rules.h"

#include <algorithm>

#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {
namespace {

/// What makes a group one of another optimizer.
struct Mark {
  const char* algorithm;          // whose states' names it has
  std::vector<const char*> keys;  // settings that it has
  const char* whose;
  const char* without = nullptr;  // a setting that it does not have
  const char* off = nullptr;      // a setting that it has as False
};

/// The first that fits counts.
const std::vector<Mark>& marks() {
  static const std::vector<Mark> all = {
      {"adam", {"grad_averaging", "trust_clip"}, "LAMB of timm"},
      {"adam", {"grad_averaging", "max_grad_norm"}, "FusedLAMB of Apex"},
      {"adam", {"max_coeff", "min_coeff"}, "FusedLamb of DeepSpeed"},
      {"adam", {"delta", "wd_ratio"}, "AdamP"},
      {"adam", {"clip_exp"}, "ADOPT of timm"},
      {"adam", {"buffer"}, "RAdam of timm"},
      {.algorithm = "adam",
       .keys = {},
       .whose = "AdamW of transformers with correct_bias=False",
       .off = "correct_bias"},
      {"adam", {"momentum_decay"}, "NAdam"},
      {"adam", {"caution"}, "NAdamW of timm", "amsgrad"},
      {"adam", {"decoupled_weight_decay", "foreach"}, "RAdam", "amsgrad"},
      {"lion", {"grad_averaging", "norm_type"}, "FusedNovoGrad of Apex"},
      {"lion", {"beta"}, "Tiger", "betas"},
      {"schedule_free", {"momentum"}, "SGDScheduleFree", "betas"},
      {"schedule_free", {"silent_sgd_phase"}, "RAdamScheduleFree"},
      {"sgd", {"trust_coeff"}, "LARS of timm"},
      {"rmsprop", {"lr_in_momentum"}, "RMSpropTF of timm"},
  };
  return all;
}

bool fits(const Mark& mark, const Group& group) {
  const Value* off = mark.off == nullptr ? nullptr : setting(group, mark.off);
  if (mark.off != nullptr && (off == nullptr || off->integer != 0)) return false;
  if (mark.without != nullptr && setting(group, mark.without) != nullptr) return false;
  return std::all_of(mark.keys.begin(), mark.keys.end(),
                     [&](const char* key) { return setting(group, key) != nullptr; });
}

}  // namespace

std::string other_rule(const std::string& algorithm, const std::vector<Group>& groups) {
  for (const Mark& mark : marks()) {
    if (algorithm == mark.algorithm &&
        std::any_of(groups.begin(), groups.end(), [&](const Group& g) { return fits(mark, g); }))
      return mark.whose;
  }
  return "";
}

}  // namespace lowbit::ckpt
