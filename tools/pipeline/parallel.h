// The same work on many things, on some threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// Calls work(i) for i in [0, count) on `threads` threads, in rising order as far as they allow.
/// Returns the error of the smallest i that failed; after a failure nothing new is begun.
inline Status parallel(size_t count, int threads, const std::function<Status(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex lock;
  size_t failed_at = count;
  std::optional<Error> first;
  const auto run = [&] {
    for (size_t i = next++; i < count && !stop; i = next++) {
      const Status done = work(i);
      if (done.ok()) continue;
      stop = true;
      const std::lock_guard guard(lock);
      if (i < failed_at) {
        failed_at = i;
        first = done.error();
      }
    }
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < std::min(static_cast<size_t>(std::max(threads, 1)), count); ++t)
    others.emplace_back(run);
  run();
  for (std::thread& t : others) t.join();
  return first ? Status(*first) : fine();
}

}  // namespace lowbit::ckpt
