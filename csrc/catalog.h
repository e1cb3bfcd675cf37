// What is registered, for those who are not compiled with it.
#pragma once

#include <cstdint>
#include <string>

#include "job.h"

namespace lowbit {

struct StateInfo {
  const char* name;
  const char* dtype;
  int bits, block;
  bool scaled, is_signed;
};
struct ParamInfo {
  const char* name;
  const char* dtype;
};
struct RuleInfo {
  const char* name;
  int slots, hypers;
};

int state_count();
StateInfo state_info(int format);
int param_count();
ParamInfo param_info(int format);
int rule_count();
RuleInfo rule_info(int rule);
/// -1 where there is none of that name.
int find_state(const std::string& name);
int find_rule(const std::string& name);
int grad_count();
const char* grad_dtype(int format);

/// Fills job.coef with the rule's factors for step t (from 1), computed in double.
void prepare(Job& job, const double* hyper, int64_t step, double g_scale);

/// Everything as JSON: {"state": [...], "rules": [...], "param": [...], "isas": [...], "isa":
/// "..."}.
std::string catalog_json();

}  // namespace lowbit
