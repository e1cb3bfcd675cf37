// The dialects there are, and which of them a checkpoint speaks.
#include <algorithm>
#include <utility>

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

// One line for each:
extern const Dialect kTorchDialect;
extern const Dialect kBitsandbytes;
extern const Dialect kTorchao;
extern const Dialect kLowbitDialect;
extern const Dialect kFlashOptim;
extern const Dialect kLpmm;
extern const Dialect kAdafactor8bit;
extern const Dialect kMuon;
extern const Dialect kMoonlight;
extern const Dialect kDion;
extern const Dialect kFusedAdam;
extern const Dialect kMegatron;
extern const Dialect kTransformers;

namespace {

constexpr const Dialect* kDialects[] = {
    &kTorchDialect, &kBitsandbytes,  &kTorchao,      &kLowbitDialect, &kFlashOptim,
    &kLpmm,         &kAdafactor8bit, &kMuon,         &kMoonlight,     &kDion,
    &kFusedAdam,    &kMegatron,      &kTransformers,
};

std::string names(const std::vector<const Dialect*>& dialects) {
  std::string s;
  for (size_t i = 0; i < dialects.size(); ++i)
    s += std::string(i == 0 ? "" : i + 1 == dialects.size() ? " or " : ", ") + dialects[i]->name;
  return s;
}

std::vector<const Dialect*> all_dialects() { return {dialects().begin(), dialects().end()}; }

Error unknown() {
  return bad(
      "holds no optimizer state that is recognized; if it has some, name the library with "
      "convert --from: " +
      names(all_dialects()));
}

}  // namespace

std::span<const Dialect* const> dialects() { return kDialects; }

const Dialect* find_dialect(const std::string& name) {
  for (const Dialect* d : dialects()) {
    if (name == d->name) return d;
  }
  return nullptr;
}

Result<Recognized> recognize(const Document& document) {
  if (!has_optimizer_tree(document)) return unknown();
  ASSIGN_OR_RETURN(tree, optimizer_tree_of(document));
  ASSIGN_OR_RETURN(dialect, recognize(document, tree));
  return Recognized{dialect, std::move(tree)};
}

Result<const Dialect*> recognize(const Document& document, const OptimizerTree& tree) {
  int best = 0;
  std::vector<const Dialect*> candidates;
  for (const Dialect* d : dialects()) {
    ASSIGN_OR_RETURN(sure, d->recognize(document, tree));
    if (sure > best) candidates.clear();
    best = std::max(best, sure);
    if (sure == best && sure > 0) candidates.push_back(d);
  }
  if (candidates.empty()) return unknown();
  if (candidates.size() > 1)
    return bad("its optimizer state may be that of " + names(candidates) +
               "; convert --from says which");
  return candidates[0];
}

}  // namespace lowbit::ckpt
