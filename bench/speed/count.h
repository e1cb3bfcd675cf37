// The instructions that a piece of code executes, counted one by one: a copy of the process is
// stepped through it. Exact and repeatable, whatever else the machine does. Linux on x86-64.
#pragma once

#include <cstdint>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdlib>
#endif

struct Count {
  int64_t all = 0;
  int64_t vectors[3] = {};  // of 128 bits or one number, of 256, of 512
  int64_t divisions = 0, roots = 0;
  int64_t of_vectors() const { return vectors[0] + vectors[1] + vectors[2]; }
};

#if defined(__linux__) && defined(__x86_64__)

/// Adds one instruction by its encoding. VEX and EVEX prefixes mark vectors; what VEX encodes for
/// general registers and masks is left out.
inline void count_one(const uint8_t* at, Count& count) {
  ++count.all;
  int map, length;
  uint8_t opcode;
  if (at[0] == 0x62) {
    map = at[1] & 7, length = at[3] >> 5 & 3, opcode = at[4];
    // A register operand with rounding control uses the bits of the length.
    if ((at[3] & 0x10) != 0 && (at[5] & 0xc0) == 0xc0) length = 2;
  } else if (at[0] == 0xc5) {
    map = 1, length = at[1] >> 2 & 1, opcode = at[2];
  } else if (at[0] == 0xc4) {
    map = at[1] & 31, length = at[2] >> 2 & 1, opcode = at[3];
  } else {
    return;
  }
  if (at[0] != 0x62) {
    const bool of_masks =
        map == 1 && ((opcode >= 0x41 && opcode <= 0x4b) || (opcode >= 0x90 && opcode <= 0x99));
    const bool of_masks_too = map == 3 && opcode >= 0x30 && opcode <= 0x33;  // shifts
    const bool of_integers =
        (map == 2 && opcode >= 0xf2 && opcode <= 0xf7) || (map == 3 && opcode == 0xf0);
    if (of_masks || of_masks_too || of_integers || opcode == 0x77) return;  // 77: vzeroupper
  }
  ++count.vectors[length > 2 ? 2 : length];
  count.divisions += map == 1 && opcode == 0x5e;
  count.roots += map == 1 && opcode == 0x51;
}

/// Counts what `run` executes. Returns false where a process may not trace its child.
template <class Run>
bool count_instructions(const Run& run, Count& count) {
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
    raise(SIGSTOP);
    run();
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  bool whole = false;
  if (waitpid(child, &status, 0) < 0 || !WIFSTOPPED(status)) return false;
  while (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0 &&
         waitpid(child, &status, 0) >= 0 && WIFSTOPPED(status)) {
    const int signal = WSTOPSIG(status);
    whole = signal == SIGSTOP;  // the second one
    if (whole) break;
    if (signal == SIGINT || signal == SIGWINCH || signal == SIGCHLD) continue;  // not handed on
    if (signal != SIGTRAP) break;
    user_regs_struct registers;
    ptrace(PTRACE_GETREGS, child, nullptr, &registers);
    // The child is a copy: its code lies at the same address here.
    count_one(reinterpret_cast<const uint8_t*>(registers.rip), count);
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return whole;
}

#else

template <class Run>
bool count_instructions(const Run&, Count&) {
  return false;
}

#endif
