// The names of DeepSpeed's files (0.19.8).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lowbit::ckpt {

struct DeepSpeedFile {
  uint64_t rank = 0;      // among the ranks that ZeRO cuts vectors for
  uint64_t parallel = 0;  // the number of a part of the model: tensor parallelism, a pipeline
  bool per_rank = true;   // false: all ranks have one such file
};

/// [bf16_|fp16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt, and its numbers.
std::optional<DeepSpeedFile> optimizer_file(const std::string& name);
/// mp_rank_MM_model_states.pt, or of stage 3 zero_pp_rank_R_mp_rank_MM_model_states.pt.
std::optional<DeepSpeedFile> model_file(const std::string& name);

}  // namespace lowbit::ckpt
