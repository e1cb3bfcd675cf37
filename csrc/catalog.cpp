#include "catalog.h"

#include <cstring>

#include "core/registry.h"
#include "cpu/step.h"

namespace lowbit {
namespace {

template <class... S>
StateInfo state_at(int i, Types<S...>) {
  const StateInfo all[] = {{S::kName, S::kDtype, S::kBits, S::kBlock, S::kScaled, S::kSigned}...};
  return all[i];
}
template <class... P>
ParamInfo param_at(int i, Types<P...>) {
  const ParamInfo all[] = {{P::kName, P::kDtype}...};
  return all[i];
}
template <class... U>
RuleInfo rule_at(int i, Types<U...>) {
  const RuleInfo all[] = {{U::kName, U::kSlots, U::kHypers}...};
  return all[i];
}
template <class... G>
const char* grad_at(int i, Types<G...>) {
  const char* all[] = {G::kDtype...};
  return all[i];
}

template <class U>
void prepare_as(Job& job, const double* hyper, int64_t step, double g_scale) {
  const typename U::Coef coef = U::prepare(hyper, step, g_scale);
  static_assert(sizeof coef <= sizeof job.coef);
  std::memcpy(job.coef, &coef, sizeof coef);
}
template <class... U>
void prepare_rule(Job& job, const double* hyper, int64_t step, double g_scale, Types<U...>) {
  using Fn = void (*)(Job&, const double*, int64_t, double);
  const Fn all[] = {prepare_as<U>...};
  all[job.rule](job, hyper, step, g_scale);
}

std::string quoted(const char* s) { return std::string("\"").append(s).append("\""); }
std::string flag(bool b) { return b ? "true" : "false"; }

template <class U>
std::string rule_json() {
  std::string slots, hypers;
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
         "]}";
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

int find_state(const std::string& name) {
  for (int i = 0; i < state_count(); ++i) {
    if (name == state_info(i).name) return i;
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
  prepare_rule(job, hyper, step, g_scale, UpdateRules{});
}

std::string catalog_json() {
  std::string state, param, isas;
  for (int i = 0; i < state_count(); ++i) {
    const StateInfo s = state_info(i);
    state += std::string(i > 0 ? ", " : "") + "{\"name\": " + quoted(s.name) +
             ", \"index\": " + std::to_string(i) + ", \"bits\": " + std::to_string(s.bits) +
             ", \"scaled\": " + flag(s.scaled) + ", \"block\": " + std::to_string(s.block) +
             ", \"signed\": " + flag(s.is_signed) + ", \"dtype\": " + quoted(s.dtype) + "}";
  }
  for (int i = 0; i < param_count(); ++i) {
    const ParamInfo p = param_info(i);
    param += std::string(i > 0 ? ", " : "") + "{\"name\": " + quoted(p.name) +
             ", \"index\": " + std::to_string(i) + ", \"dtype\": " + quoted(p.dtype) + "}";
  }
  for (const char* c = cpu::usable_isas(); *c != '\0'; ++c)
    isas += *c == ' ' ? std::string("\", \"") : std::string(1, *c);
  return "{\"state\": [" + state + "], \"rules\": [" + rules_json(UpdateRules{}) +
         "], \"param\": [" + param + "], \"isas\": [\"" + isas +
         "\"], \"isa\": " + quoted(cpu::leaves().isa) + "}";
}

}  // namespace lowbit
