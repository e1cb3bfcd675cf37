// A progress bar on standard error, only where that is a terminal.
#pragma once

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include "command/errors.h"
#include "command/signals.h"

namespace lowbit::ckpt {

/// One line of at most `columns` - 1 letters: the bar, what is done, how fast, and the time that is
/// left. Where there is less room, first the bar goes, and then the rest from its end.
inline std::string progress_line(const std::string& label, uint64_t done, uint64_t total,
                                 double seconds, int columns) {
  const double part = static_cast<double>(done) / static_cast<double>(total);
  std::string text = fmt::format("{:.1f} of {:.1f} MiB", static_cast<double>(done) / 1048576.0,
                                 static_cast<double>(total) / 1048576.0);
  if (seconds >= 1 && done > 0) {
    text += fmt::format(", {:.0f} MiB/s", static_cast<double>(done) / 1048576.0 / seconds);
    const auto left = static_cast<uint64_t>(seconds / part - seconds + 0.5);
    text += left >= 3600
                ? fmt::format(", {}:{:02}:{:02} left", left / 3600, left / 60 % 60, left % 60)
                : fmt::format(", {}:{:02} left", left / 60, left % 60);
  }
  constexpr int kMax = 40, kMin = 8;
  const int room = columns - 1 - static_cast<int>(label.size() + text.size()) - 4;
  const int width = std::min(room, kMax);
  std::string line = label + " ";
  if (width >= kMin) {
    const auto filled = static_cast<int>(part * width);
    line += fmt::format("[{:#<{}}{:.<{}}] ", "", filled, "", width - filled);
  }
  line += text;
  return line.substr(0, static_cast<size_t>(std::max(columns - 1, 0)));
}

class ProgressBar {
 public:
  ProgressBar(std::string label, bool quiet)
      : label_(std::move(label)), shown_(!quiet && ::isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() { clear(); }
  /// Takes the bar off the screen, before something else is said.
  void clear() {
    if (drawn_) print_error("\r\033[K");
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
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    print_error(fmt::format("\r{}\033[K", progress_line(label_, done, total, seconds, columns())));
    std::fflush(stderr);
    drawn_ = true;
  }
  static int columns() {
    struct winsize size;
    return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  }
  std::string label_;
  bool shown_, drawn_ = false;
  std::chrono::steady_clock::time_point last_{}, begin_ = std::chrono::steady_clock::now();
};

}  // namespace lowbit::ckpt
