// How bitsandbytes and torchao round values to codes, and which of their formats are lowbit's too.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dialect/requantize/blocks.h"

namespace lowbit::ckpt {

/// A rising codebook, and the boundaries between its codes: they define what "nearest" means.
class NearestRule : public TableRule {
 public:
  /// boundaries[c] is the least value that gets a code above c. `minimum` bounds scales from below.
  NearestRule(std::vector<float> table, std::vector<float> boundaries, float minimum);
  Scale scale(const float* x, int64_t n, uint16_t* spare) const override;
  Scale quantize(const float* x, int64_t n, uint16_t* codes) const override;

 private:
  std::vector<float> boundaries_;
  const float min_;
  std::vector<uint8_t> start_;  // a code not above that of any z with these leading bits
  int steps_ = 0;               // that it is below it at most
};

/// bitsandbytes' rule: the nearest code, the even one in a tie; the scale is the absmax of the
/// block, 0 for a block of zeros. This is its CUDA kernels' rule. On the CPU bitsandbytes uses a
/// table of 65536 steps, which loses exact zeros.
std::shared_ptr<const BlockRule> bitsandbytes_rule(std::vector<float> table);
/// torchao's rule: the nearest code by its arithmetic, the higher one in a tie; scales are at least
/// 1e-12.
std::shared_ptr<const BlockRule> torchao_rule(std::vector<float> table);
/// torchao's fp8 rule: torch.float8_e4m3fn of values over absmax / 448 (at least 1e-12).
std::shared_ptr<const BlockRule> torchao_float8_rule();

/// The lowbit format with this codebook, code by code; "" if there is none.
std::string format_of_table(const std::vector<float>& table, bool is_signed);

/// Codes in blocks of a flattened tensor as rows of a matrix. Empty if blocks go over rows.
std::optional<Codes> codes_of_rows(const Shape& shape, const std::string& format, int bits,
                                   int64_t block, std::shared_ptr<Source> codes,
                                   std::shared_ptr<Source> scales);
/// The codes of a state as blocks of the flattened tensor. Empty if they have another format or
/// block length (0: any), or if rows cut blocks.
std::optional<Codes> flat_codes(const State& state, const std::string& format, int64_t block);

/// An error if the shape of a state is unknown; a warning if it is known as a matrix only, which is
/// what lowbit's files tell.
Status check_shape(const Param& param, const State& state, DialectReport& report);

}  // namespace lowbit::ckpt
