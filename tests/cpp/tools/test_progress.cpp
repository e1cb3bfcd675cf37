// The line of the progress bar: what a person reads after a second and more, which no short test
// sees.
#include <string>

#include "check.h"
#include "command/progress.h"

namespace {

using lowbit::ckpt::progress_line;

constexpr uint64_t kMiB = 1u << 20;

void same(const std::string& line, const std::string& wanted) {
  check(line == wanted, "'" + line + "' is not '" + wanted + "'");
}

/// Half of 2400 MiB in 12 seconds: 100 MiB/s, and 12 seconds left.
void widths() {
  const auto at = [](int columns) {
    return progress_line("verify", 1200 * kMiB, 2400 * kMiB, 12.0, columns);
  };
  const std::string text = "1200.0 of 2400.0 MiB, 100 MiB/s, 0:12 left";
  same(at(120), "verify [" + std::string(20, '#') + std::string(20, '.') + "] " + text);
  same(at(80), "verify [" + std::string(13, '#') + std::string(14, '.') + "] " + text);
  same(at(61), "verify [####....] " + text);
  same(at(60), "verify " + text);
  same(at(45), ("verify " + text).substr(0, 44));
  same(at(20), "verify 1200.0 of 24");
  same(at(1), "");
  same(at(0), "");
  for (int columns = 1; columns < 200; ++columns)
    check(at(columns).size() < static_cast<size_t>(columns), "a line is shorter than the terminal");
}

void times() {
  const auto left = [](double seconds, uint64_t done) {
    const std::string line = progress_line("x", done * kMiB, 1000 * kMiB, seconds, 50);
    const size_t comma = line.rfind(", ");
    return comma == std::string::npos ? "" : line.substr(comma + 2);
  };
  same(left(0.9, 500), "");  // too early to tell
  same(left(5, 0), "");
  same(left(1, 500), "0:01 left");
  same(left(59, 500), "0:59 left");
  same(left(60, 500), "1:00 left");
  same(left(100, 10), "2:45:00 left");
  same(left(3600, 500), "1:00:00 left");
  same(left(10, 1000), "0:00 left");
}

}  // namespace

int main() {
  widths();
  times();
  return finish();
}
