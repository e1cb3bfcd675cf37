// Makes the mistakes planted in the CUDA sources one at a time and asks whether each is seen. Each
// runs in a process of its own, which may crash, hang or wait for a barrier that no other thread
// comes to. Include after `mutation`, the sources and what compares them, which has `check`.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "mutations.inc"

namespace lowbit {
namespace {

/// Where to look, and first for mistakes in which files: the rest of the search is then not needed.
struct Place {
  bool (*differ)();
  const char* files;
};

template <size_t kCount>
bool differs(const Place (&places)[kCount], const std::string& mistake) {
  const std::string file = mistake.substr(0, mistake.find(':'));
  for (const bool likely : {true, false}) {
    for (const Place& place : places) {
      if ((std::strstr(place.files, file.c_str()) != nullptr) != likely) continue;
      for (const bool backwards : {false, true}) {
        emulator::machine.backwards = backwards;
        if (place.differ()) return true;
      }
    }
  }
  return false;
}

/// Whether a mistake is seen, as the exit status of a process.
template <size_t kCount>
[[noreturn]] void look(const Place (&places)[kCount], int number) {
  alarm(number == 0 ? 600 : 60);  // which is seen as well, and without a mistake must not be
  if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
  mutation = number;
  _exit(differs(places, kMutations[number]) ? 1 : 0);
}

/// The mistakes that are `mine`, and none; the exit status of the program.
template <size_t kCount, class Mine>
int run_mutations(const Place (&places)[kCount], const Mine& mine) {
  const int count = static_cast<int>(sizeof(kMutations) / sizeof(kMutations[0]));
  const int most = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::map<pid_t, int> running;
  for (int next = 0; next < count || !running.empty();) {
    if (next < count && next > 0 && !mine(kMutations[next])) {
      ++next;
      continue;
    }
    if (next < count && static_cast<int>(running.size()) < most) {
      std::fflush(stdout);
      const pid_t child = fork();
      if (child == 0) look(places, next);
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
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace lowbit
