#include "command/signals.h"

#include <atomic>
#include <csignal>

namespace lowbit::ckpt {
namespace {

std::atomic<bool> requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);

void request(int) { requested = true; }

}  // namespace

void watch_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now = {}, before = {};
    now.sa_handler = request;
    // The second signal ends the program at once.
    now.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
    if (sigaction(number, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
      sigaction(number, &now, nullptr);
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

bool stop_requested() { return requested; }

}  // namespace lowbit::ckpt
