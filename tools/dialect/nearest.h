// How bitsandbytes and torchao round values to codes, and which of their codes are lowbit's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dialect/blocks.h"

namespace lowbit::ckpt {

/// A rising table of values, and from which z on the next code is taken. Everything that "nearest"
/// may mean is in these boundaries.
class NearestRule : public BlockRule {
 public:
  /// boundaries[c] is the least z that becomes a code above c. `least` bounds scales from below.
  NearestRule(std::vector<float> table, std::vector<float> boundaries, float least);
  void decode(const uint16_t* codes, const Scale& scale, int64_t n, float* out) const override;
  Scale scale(const float* x, int64_t n, uint16_t* spare) const override;
  Scale encode(const float* x, int64_t n, uint16_t* codes) const override;

 private:
  const std::vector<float> table_;
  std::vector<float> boundaries_;
  const float least_;
  std::vector<uint8_t> start_;  // a code not above that of any z with these leading bits
  int steps_ = 0;               // that it is below it at most
};

/// The nearest entry, the even code where two are as near; a block's scale is its largest
/// magnitude, 0 in a block of zeros. (The kernels on CUDA; on the CPU bitsandbytes goes through a
/// table of 65536 steps, which loses exact zeros.)
std::shared_ptr<const BlockRule> bitsandbytes_rule(std::vector<float> table);
/// The nearest entry as torchao's arithmetic finds it, the higher one where two are as near; scales
/// are 1e-12 at least.
std::shared_ptr<const BlockRule> torchao_rule(std::vector<float> table);
/// torch.float8_e4m3fn of values over a 448th of the largest magnitude (1e-12 at least).
std::shared_ptr<const BlockRule> torchao_float8_rule();

/// The lowbit format whose table has these values, code by code; "" where there is none.
std::string format_of_table(const std::vector<float>& table, bool is_signed);

/// The codes of a state as one run of blocks over the flattened tensor, where they are of that
/// format and block (0: any) and rows do not cut blocks.
std::optional<Codes> flat_codes(const State& state, const std::string& format, int64_t block);

/// An error where nobody knows the state's shape. Where it is known as a matrix only, which is what
/// lowbit's files tell, a warning says so.
Status check_shape(const Param& param, const State& state, DialectReport& report);

}  // namespace lowbit::ckpt
