#include "catalog.h"

#include <cstring>

#include "core/registry.h"
#include "core/settle.h"
#include "cpu/step.h"

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
    info.measurable = !Scale::kNeedsLeast;
  }
  return info;
}
template <class P>
constexpr ParamInfo param_of() {
  const bool extra = P::kExtraDtype[0] != 0;
  return {P::kName,
          P::kDtype,
          P::kExtraDtype,
          static_cast<int>(sizeof(typename P::Storage)),
          extra ? static_cast<int>(sizeof(typename P::Extra)) : 0,
          P::kRandom};
}
template <class U>
constexpr RuleInfo rule_of() {
  RuleInfo info{U::kName,        U::kSlots,    U::kHypers, factors_of<U>(), rounds_of<U>(),
                numbers_of<U>(), {-1, -1, -1}, {0, 0, 0},  U::kSlot};
  if constexpr (rounds_of<U>() > 0) {
    for (int r = 0; r < rounds_of<U>(); ++r)
      info.grid_factor[r] = U::grid_factor(r), info.totals[r] = U::totals(r);
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

/// Calls fn with the registered type at an index.
template <class Fn, class... T>
void visit(int index, Types<T...>, const Fn& fn) {
  int i = 0;
  ((i++ == index ? fn(static_cast<T*>(nullptr)) : void()), ...);
}

std::string quoted(const char* s) { return std::string("\"").append(s).append("\""); }
std::string flag(bool b) { return b ? "true" : "false"; }

template <class U>
std::string rule_json() {
  std::string slots, hypers, factors, number, grids;
  if constexpr (factors_of<U>() > 0) {
    for (int i = 0; i < U::kFactors; ++i)
      factors += std::string(i > 0 ? ", " : "") + quoted(U::kFactor[i]);
  }
  if constexpr (numbers_of<U>() > 0) number = U::kNumber;
  if constexpr (rounds_of<U>() > 0) {
    for (int i = 0; i < U::kRounds; ++i)
      grids += (i > 0 ? ", " : "") + std::to_string(U::grid_factor(i));
  }
  for (int i = 0; i < U::kSlots; ++i) {
    if (i > 0) slots += ", ";
    slots += "{\"name\": " + quoted(U::kSlot[i].name) +
             ", \"signed\": " + flag(U::kSlot[i].is_signed) + "}";
  }
  for (int i = 0; i < U::kHypers; ++i) {
    if (i > 0) hypers += ", ";
    hypers += quoted(U::kHyper[i]);
  }
  return "{\"name\": " + quoted(U::kName) + ", \"slots\": [" + slots + "], \"hyper\": [" + hypers +
         "], \"factors\": [" + factors + "], \"rounds\": " + std::to_string(rounds_of<U>()) +
         ", \"grids\": [" + grids + "], \"numbers\": " + std::to_string(numbers_of<U>()) +
         ", \"number\": " + quoted(number.c_str()) + "}";
}
template <class... U>
std::string rules_json(Types<U...>) {
  std::string all;
  ((all += (all.empty() ? "" : ", ") + rule_json<U>()), ...);
  return all;
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

void prepare(Job& job, const double* hyper, int64_t step, double g_scale) {
  visit(job.rule, UpdateRules{}, [&]<class U>(U*) {
    const typename U::Coef coef = U::prepare(hyper, step, g_scale);
    static_assert(sizeof coef <= sizeof job.coef);
    std::memcpy(job.coef, &coef, sizeof coef);
  });
}

void settle(Job& job, int round, bool keep) {
  visit(job.rule, UpdateRules{}, [&]<class U>(U*) {
    typename U::Coef coef;
    std::memcpy(&coef, job.coef, sizeof coef);
    int64_t digit[ExactSum::kBins];
    settle_round<U>(round, job.totals, job.numel, job.numbers, keep, digit, coef);
    std::memcpy(job.coef, &coef, sizeof coef);
  });
}

void settle_factor(const Job& job, int round) {
  const int k = rule_info(job.rule).grid_factor[round];
  FactorMove move{};
  visit(job.rule, UpdateRules{}, [&]<class U>(U*) {
    typename U::Coef coef;
    std::memcpy(&coef, job.coef, sizeof coef);
    move = factor_move<U>(k, coef);
  });
  constexpr int kWords = ExactSum::kWords;
  const Factor& factor = job.factor[k];
  const double cols = static_cast<double>(job.global_inner_cols),
               rows = static_cast<double>(job.global_inner_rows);
  if (job.global_inner_rows == 0 || job.global_inner_cols == 0) return;  // nothing has a mean
  for (int64_t b = 0; b < job.batches; ++b) {
    // The rows' new mean from sums that every holder of the batch has: the rows' old sum, and all
    // that was added, which is the sum over the columns. (A single matrix may be cut both ways; its
    // sum lies with the totals.)
    const int64_t* sums = factor.col_sums + b * (job.inner_cols + 1) * kWords;
    int64_t added[kWords] = {};
    for (int64_t c = 0; c < job.inner_cols; ++c) {
      float& mean = factor.col[b * job.inner_cols + c];
      mean = moved(mean, exact_value(sums + c * kWords) / rows, move.weight);
      for (int i = 0; i < kWords; ++i) added[i] += sums[c * kWords + i];
      exact_carry(added);
    }
    const double old = exact_value(sums + job.inner_cols * kWords) / rows;
    const int64_t* all = job.totals + (round * kMaxTotals + kGridTotal) * kWords;
    const double fresh = exact_value(job.batches == 1 ? all : added) / (rows * cols);
    const double mean = mean_of_rows(old, fresh, move);
    for (int64_t r = b * job.inner_rows; r < (b + 1) * job.inner_rows; ++r) {
      float& row = factor.row[r];
      row = moved(row, exact_value(factor.row_sums + r * kWords) / cols, move.weight);
      factor.scaled[r] = scaled_row(row, mean);
    }
  }
}

std::string catalog_json() {
  std::string state, param, isas;
  for (int i = 0; i < state_count(); ++i) {
    const StateInfo s = state_info(i);
    state += std::string(i > 0 ? ", " : "") + "{\"name\": " + quoted(s.name) +
             ", \"index\": " + std::to_string(i) + ", \"bits\": " + std::to_string(s.bits) +
             ", \"scaled\": " + flag(s.scaled) + ", \"block\": " + std::to_string(s.block) +
             ", \"signed\": " + flag(s.is_signed) + ", \"dtype\": " + quoted(s.dtype) +
             ", \"domain\": " + quoted(s.domain) + ", \"scale_dtype\": " + quoted(s.scale_dtype) +
             ", \"scale_numbers\": " + std::to_string(s.scale_numbers) +
             ", \"measurable\": " + flag(s.measurable) + "}";
  }
  for (int i = 0; i < param_count(); ++i) {
    const ParamInfo p = param_info(i);
    param += std::string(i > 0 ? ", " : "") + "{\"name\": " + quoted(p.name) +
             ", \"index\": " + std::to_string(i) + ", \"dtype\": " + quoted(p.dtype) +
             ", \"extra\": " + quoted(p.extra_dtype) +
             ", \"extra_bytes\": " + std::to_string(p.extra_bytes) +
             ", \"random\": " + flag(p.random) + "}";
  }
  for (const char* c = cpu::usable_isas(); *c != '\0'; ++c)
    isas += *c == ' ' ? std::string("\", \"") : std::string(1, *c);
  return "{\"state\": [" + state + "], \"rules\": [" + rules_json(UpdateRules{}) +
         "], \"param\": [" + param + "], \"isas\": [\"" + isas +
         "\"], \"isa\": " + quoted(cpu::leaves().isa) + "}";
}

}  // namespace lowbit
