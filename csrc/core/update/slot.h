// One state tensor of an update rule.
#pragma once

namespace lowbit {

struct Slot {
  const char* name;  // torch's name for it
  bool is_signed;    // false: never negative, so a format without negative codes serves it
};

}  // namespace lowbit
