// Applies the mistakes planted in the CUDA sources one at a time and checks that each is detected.
// Each runs in a process of its own, which may crash, hang, or wait for a barrier that no other
// thread reaches. Include after `mutation`, the sources, and the comparison that defines `check`.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "check.h"
#include "mutations.inc"

namespace lowbit {
namespace {

/// A comparison, and the files whose mistakes it probably detects. It runs first for these files.
struct Comparison {
  bool (*differ)();
  const char* files;
};

template <size_t kCount>
bool differs(const Comparison (&comparisons)[kCount], const std::string& mistake) {
  const std::string file = mistake.substr(0, mistake.find(':'));
  for (const bool likely : {true, false}) {
    for (const Comparison& comparison : comparisons) {
      if ((std::strstr(comparison.files, file.c_str()) != nullptr) != likely) continue;
      for (const bool backwards : {false, true}) {
        emulator::machine.backwards = backwards;
        if (comparison.differ()) return true;
      }
    }
  }
  return false;
}

/// Whether a mistake is detected, as the exit status of a process.
template <size_t kCount>
[[noreturn]] void look(const Comparison (&comparisons)[kCount], int number) {
  // A timeout counts as detected; without a mistake, where all comparisons take 2 to 3 seconds of a
  // core, it must not occur.
  alarm(number == 0 ? 600 : 60);
  const rlimit cpu{20, 20};
  if (number != 0) setrlimit(RLIMIT_CPU, &cpu);
  if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
  mutation = number;
  _exit(differs(comparisons, kMutations[number]) ? 1 : 0);
}

/// Runs without a mistake, then with each mistake that is `mine`. Returns the exit status of the
/// program.
template <size_t kCount, class Mine>
int run_mutations(const Comparison (&comparisons)[kCount], const Mine& mine) {
  const int count = static_cast<int>(sizeof(kMutations) / sizeof(kMutations[0]));
  const int absmax = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::map<pid_t, int> running;
  for (int next = 0; next < count || !running.empty();) {
    if (next < count && next > 0 && !mine(kMutations[next])) {
      ++next;
      continue;
    }
    if (next < count && static_cast<int>(running.size()) < absmax) {
      std::fflush(stdout);
      const pid_t child = fork();
      if (child == 0) look(comparisons, next);
      running[child] = next++;
      continue;
    }
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    const int number = running[ended];
    running.erase(ended);
    const bool seen = !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check(number == 0 ? !seen : seen,
          std::string(number == 0 ? "a difference without a mistake: " : "not seen: ") +
              kMutations[number]);
  }
  return finish();
}

}  // namespace
}  // namespace lowbit
