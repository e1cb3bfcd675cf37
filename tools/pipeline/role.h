// What a tensor of a checkpoint is for, by its name.
#pragma once

#include <string>

namespace lowbit::ckpt {

/// What the name says, for people: "codes, dynamic8", "scales, dynamic8", "full-precision state,
/// float32", "weights and other tensors", ... The format is part of the name of lowbit's state
/// (docs/definitions/formats.md).
std::string kind_of(const std::string& name);

/// What values a floating-point tensor of that name may have.
enum class Role {
  kBits,           // anything: bits that are kept under another dtype
  kWeight,         // no NaN; an infinity is worth a warning
  kState,          // finite
  kPositiveState,  // finite and not negative: second moments, the scales of most formats
};
Role role_of(const std::string& name);

}  // namespace lowbit::ckpt
