// What is registered, for those who are not compiled with it.
#pragma once

#include <cstdint>
#include <string>

#include "core/update/rule.h"
#include "job.h"

namespace lowbit {

struct StateInfo {
  const char* name;
  const char* dtype;
  int bits, block;
  bool scaled, is_signed;
  const char* domain;       // in which a code is the nearest
  const char* scale_dtype;  // of a block's scale, "" where there is none
  int scale_numbers;        // for each block
  int scale_bytes;          // all of them
  bool measurable;          // whether the scale may cover more than a block
};
struct ParamInfo {
  const char* name;
  const char* dtype;
  const char* extra_dtype;  // "" where nothing is kept beside the parameter
  int bytes, extra_bytes;
  bool random;
};
struct RuleInfo {
  static constexpr int kMostRounds = 3;
  const char* name;
  int slots, hypers, factors, rounds, numbers;
  int grid_factor[kMostRounds], totals[kMostRounds];  // of each round
  const Slot* slot;                                   // state tensors, `slots` of them
};

int state_count();
StateInfo state_info(int format);
int param_count();
ParamInfo param_info(int format);
int rule_count();
RuleInfo rule_info(int rule);
/// -1 where there is none of that name.
int find_state(const std::string& name);
int find_param(const std::string& name);
int find_rule(const std::string& name);
int grad_count();
const char* grad_dtype(int format);
int grad_bytes(int format);

/// Fills job.coef with the rule's factors for step t (from 1), computed in double.
void prepare(Job& job, const double* hyper, int64_t step, double g_scale);

/// After round `round`: takes what the reduced sums make of it into job.coef; `keep` also writes
/// the tensor's numbers.
void settle(Job& job, int round, bool keep);
/// Moves row and column means of the round's factored moment to the new ones, for inner rows and
/// column sums of the whole job.
void settle_factor(const Job& job, int round);

/// Everything as JSON: {"state": [...], "rules": [...], "param": [...], "isas": [...], "isa":
/// "..."}.
std::string catalog_json();

}  // namespace lowbit
