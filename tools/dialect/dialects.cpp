// The dialects there are, and which of them a checkpoint speaks.
#include <algorithm>

#include "dialect/dialect.h"

namespace lowbit::ckpt {

// One line for each:
extern const Dialect kTorchDialect;
extern const Dialect kBitsandbytes;
extern const Dialect kTorchao;
extern const Dialect kLowbitDialect;
extern const Dialect kFlashOptim;
extern const Dialect kLpmm;
extern const Dialect kAdafactor8bit;

namespace {

constexpr const Dialect* kDialects[] = {
    &kTorchDialect, &kBitsandbytes, &kTorchao,       &kLowbitDialect,
    &kFlashOptim,   &kLpmm,         &kAdafactor8bit,
};

std::string names(const std::vector<const Dialect*>& dialects) {
  std::string s;
  for (size_t i = 0; i < dialects.size(); ++i)
    s += std::string(i == 0 ? "" : i + 1 == dialects.size() ? " or " : ", ") + dialects[i]->name;
  return s;
}

}  // namespace

std::span<const Dialect* const> dialects() { return kDialects; }

const Dialect* find_dialect(const std::string& name) {
  for (const Dialect* d : dialects()) {
    if (name == d->name) return d;
  }
  return nullptr;
}

Result<const Dialect*> recognize(const Document& document) {
  int best = 0;
  std::vector<const Dialect*> candidates;
  for (const Dialect* d : dialects()) {
    LB_TRY(sure, d->recognize(document));
    if (sure > best) candidates.clear();
    best = std::max(best, sure);
    if (sure == best && sure > 0) candidates.push_back(d);
  }
  const std::vector<const Dialect*> all(dialects().begin(), dialects().end());
  if (candidates.empty())
    return bad("holds no optimizer state that is known; if it does, convert --from says whose: " +
               names(all));
  if (candidates.size() > 1)
    return bad("its optimizer state may be that of " + names(candidates) +
               "; convert --from says which");
  return candidates[0];
}

}  // namespace lowbit::ckpt
