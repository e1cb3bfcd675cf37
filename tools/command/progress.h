// A progress bar on standard error, only where that is a terminal.
#pragma once

#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include "command/signals.h"

namespace lowbit::ckpt {

class ProgressBar {
 public:
  ProgressBar(std::string label, bool quiet)
      : label_(std::move(label)), shown_(!quiet && ::isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() { clear(); }
  /// Takes the bar off the screen, before something else is said.
  void clear() {
    if (drawn_) fmt::print(stderr, "\r\033[K");
    drawn_ = false;
  }
  /// False where the program was asked to stop (command/signals.h).
  std::function<bool(uint64_t, uint64_t)> function() {
    return [this](uint64_t done, uint64_t total) {
      update(done, total);
      return !stop_requested();
    };
  }

 private:
  void update(uint64_t done, uint64_t total) {
    if (!shown_ || total == 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(80) && done < total) return;
    last_ = now;
    constexpr int kWidth = 40;
    const auto filled =
        static_cast<int>(static_cast<double>(done) / static_cast<double>(total) * kWidth);
    fmt::print(stderr, "\r{} [{:#<{}}{:.<{}}] {:.1f} of {:.1f} MiB", label_, "", filled, "",
               kWidth - filled, static_cast<double>(done) / 1048576.0,
               static_cast<double>(total) / 1048576.0);
    std::fflush(stderr);
    drawn_ = true;
  }
  std::string label_;
  bool shown_, drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace lowbit::ckpt
