// One function over many items, on several threads.
#pragma once

#include <cstddef>
#include <functional>

#include "io/status.h"

namespace lowbit::ckpt {

/// Calls work(i) for i in [0, count) on `threads` threads (at least one); items start in rising
/// order. After a failure no new item starts, and the result is the error of the smallest i that
/// failed. Running out of memory on a thread is a failure too.
Status parallel(size_t count, int threads, const std::function<Status(size_t)>& work);

}  // namespace lowbit::ckpt
