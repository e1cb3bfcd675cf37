#include "io/parallel.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace lowbit::ckpt {

Status parallel(size_t count, int threads, const std::function<Status(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex lock;
  size_t failed_at = count;
  std::optional<Error> first;
  const auto one = [&](size_t i) -> Status {
    // An exception that leaves a thread ends the program.
    try {
      return work(i);
    } catch (const std::bad_alloc&) {
      return failed("not enough memory");
    }
  };
  const auto run = [&] {
    for (size_t i = next++; i < count && !stop; i = next++) {
      const Status done = one(i);
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
  try {
    for (size_t t = 1; t < std::min(static_cast<size_t>(std::max(threads, 1)), count); ++t)
      others.emplace_back(run);
  } catch (const std::system_error&) {
    // The system has no more threads for this process: those that began do all.
  }
  run();
  for (std::thread& t : others) t.join();
  return first ? Status(*first) : fine();
}

}  // namespace lowbit::ckpt
