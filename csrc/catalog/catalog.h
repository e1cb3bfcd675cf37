// What is registered, by number and by name, for those who are not compiled with it.
#pragma once

#include <cstdint>
#include <string>

#include "core/job.h"
#include "core/update/rule.h"

namespace lowbit {

struct StateInfo {
  const char* name;
  const char* dtype;
  int bits, block;
  bool scaled, is_signed;
  const char* domain;       // in which a code is the nearest
  const char* scale_dtype;  // of a block's scale, "" for a format without scales
  int scale_numbers;        // for each block
  int scale_bytes;          // all of them
  bool cross_tile;          // whether the scale may cover more than a block
};
struct ParamInfo {
  const char* name;
  const char* dtype;
  const char* compensation_dtype;  // "" for a format without compensation
  int bytes, compensation_bytes;
  bool random;
};
struct RuleInfo {
  static constexpr int kMaxRounds = 3;
  const char* name;
  int slots, hypers, factors, rounds, numbers;
  int grid_factor[kMaxRounds], totals[kMaxRounds];  // of each round
  const Slot* slot;                                 // state tensors, `slots` of them
  int reads[kMaxRounds];                            // Reads of each round
  const char* const* hyper;                         // their names, `hypers` of them
  const char* const* factor;                        // and of `factors`
  const char* number;                               // "" for a rule without numbers
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

}  // namespace lowbit
