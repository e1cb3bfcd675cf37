// Arithmetic as it is elsewhere, whatever a program that uses this library has switched.
#pragma once

#include <functional>

#include "io/status.h"

namespace lowbit::ckpt {

/// Runs `work` in the default floating-point environment, which threads that it begins have too:
/// Python may have called this from a thread that flushes denormal numbers.
Status with_plain_arithmetic(const std::function<Status()>& work);

}  // namespace lowbit::ckpt
