// The same work on many things, on some threads.
#pragma once

#include <cstddef>
#include <functional>

#include "io/status.h"

namespace lowbit::ckpt {

/// Calls work(i) for i in [0, count) on `threads` threads (at least one), in rising order as far as
/// they allow. After a failure nothing new is begun; the result is the error of the smallest i that
/// failed. A thread that runs out of memory is a failure like any other.
Status parallel(size_t count, int threads, const std::function<Status(size_t)>& work);

}  // namespace lowbit::ckpt
