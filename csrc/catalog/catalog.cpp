#include "catalog/catalog.h"

#include "core/finalize.h"
#include "core/registry.h"

namespace lowbit {
namespace {

template <class S>
constexpr StateInfo state_of() {
  StateInfo info{S::kName, S::kDtype, S::kBits, S::kBlock, S::kScaled, S::kSigned,
                 "linear", "",        0,        0,         false};
  if constexpr (S::kScaled) {
    using Scale = typename S::Scale;
    info.domain = S::kDomain;
    info.scale_dtype = sizeof(typename Scale::Stored) == 4 ? "float32" : "float16";
    info.scale_numbers = Scale::kStored;
    info.scale_bytes = Scale::kStored * static_cast<int>(sizeof(typename Scale::Stored));
    info.cross_tile = !Scale::kNeedsMin;
  }
  return info;
}
template <class P>
constexpr ParamInfo param_of() {
  const bool compensation = P::kCompensationDtype[0] != 0;
  return {P::kName,
          P::kDtype,
          P::kCompensationDtype,
          static_cast<int>(sizeof(typename P::Storage)),
          compensation ? static_cast<int>(sizeof(typename P::Compensation)) : 0,
          P::kRandom};
}
template <class U>
constexpr RuleInfo rule_of() {
  static_assert(U::kSlots <= kMaxSlots && factors_of<U>() <= kMaxFactors,
                "a rule with more state than core/layout.h has room for");
  static_assert(rounds_of<U>() <= RuleInfo::kMaxRounds,
                "a rule with more rounds than catalog/catalog.h has room for");
  RuleInfo info{U::kName,        U::kSlots,    U::kHypers, factors_of<U>(), rounds_of<U>(),
                numbers_of<U>(), {-1, -1, -1}, {0, 0, 0},  U::kSlot,        {0, 0, 0},
                U::kHyper,       nullptr,      ""};
  if constexpr (factors_of<U>() > 0) info.factor = U::kFactor;
  if constexpr (numbers_of<U>() > 0) info.number = U::kNumber;
  if constexpr (rounds_of<U>() > 0) {
    for (int r = 0; r < rounds_of<U>(); ++r)
      info.grid_factor[r] = U::grid_factor(r), info.totals[r] = U::totals(r),
      info.reads[r] = reads_of<U>(r);
  }
  return info;
}

template <class... S>
const StateInfo& state_at(int i, Types<S...>) {
  static constexpr StateInfo all[] = {state_of<S>()...};
  return all[i];
}
template <class... P>
const ParamInfo& param_at(int i, Types<P...>) {
  static constexpr ParamInfo all[] = {param_of<P>()...};
  return all[i];
}
template <class... U>
const RuleInfo& rule_at(int i, Types<U...>) {
  static constexpr RuleInfo all[] = {rule_of<U>()...};
  return all[i];
}
template <class... G>
const char* grad_at(int i, Types<G...>) {
  const char* all[] = {G::kDtype...};
  return all[i];
}
template <class... G>
int grad_bytes_at(int i, Types<G...>) {
  const int all[] = {static_cast<int>(sizeof(typename G::Storage))...};
  return all[i];
}

}  // namespace

int state_count() { return StateFormats::kCount; }
StateInfo state_info(int format) { return state_at(format, StateFormats{}); }
int param_count() { return ParamFormats::kCount; }
ParamInfo param_info(int format) { return param_at(format, ParamFormats{}); }
int rule_count() { return UpdateRules::kCount; }
RuleInfo rule_info(int rule) { return rule_at(rule, UpdateRules{}); }
int grad_count() { return GradFormats::kCount; }
const char* grad_dtype(int format) { return grad_at(format, GradFormats{}); }
int grad_bytes(int format) { return grad_bytes_at(format, GradFormats{}); }

int find_state(const std::string& name) {
  for (int i = 0; i < state_count(); ++i) {
    if (name == state_info(i).name) return i;
  }
  return -1;
}
int find_param(const std::string& name) {
  for (int i = 0; i < param_count(); ++i) {
    if (name == param_info(i).name) return i;
  }
  return -1;
}
int find_rule(const std::string& name) {
  for (int i = 0; i < rule_count(); ++i) {
    if (name == rule_info(i).name) return i;
  }
  return -1;
}

}  // namespace lowbit
