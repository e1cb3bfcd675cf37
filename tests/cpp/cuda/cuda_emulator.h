// Runs CUDA kernel source on the CPU. Include it before the source. Every thread of a block is a
// fiber that runs until it waits for others, so barriers, shuffles and ballots act as on a GPU, one
// block after another. A warp runs as far as it can before the next one begins, so a missing
// barrier changes the results. Shared memory starts as garbage. Only the features that our kernels
// use are present. With LOWBIT_SIMULATOR a simulator runs the kernels' PTX instead
// (simulator/cuda_simulator.h).
#pragma once

#include <math.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_races.h"

namespace emulator {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

/// Jumps by compiler built-ins. A context switch of the C library is a system call. Under the
/// address sanitizer so is its longjmp, which clears a stack that is never unwound here.
#define LB_JUMPS __attribute__((noinline, no_sanitize("address", "thread")))
using JumpBuffer = void* [5];
[[noreturn]] LB_JUMPS inline void jump(JumpBuffer& to) { __builtin_longjmp(to, 1); }

struct Fiber {
  ucontext_t context;
  JumpBuffer resume_point;  // where the fiber waits
  std::unique_ptr<char[]> stack;
  void* seen = nullptr;  // the fiber of the thread sanitizer
  bool started = false, done = false;
};

struct Warp {
  uint32_t value[2][32];
  int arrived = 0;
  int64_t generation = 0;
  char order[2];  // what each of two consecutive barriers orders
};

struct Machine {
  static constexpr size_t kStack = races::kSeen ? 512 << 10 : 64 << 10, kShared = 64 << 10;
  Dim3 thread, block, blocks, threads;
  bool backwards = false;  // whether the last lane and the last warp run first
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  JumpBuffer scheduler;
  void* seen = nullptr;  // the fiber of the thread sanitizer
  char begun, ended, order[2];
  unsigned running = 0;
  int block_arrived = 0;
  int64_t block_generation = 0, progress = 0, launches = 0;
  std::function<void()> kernel;
  alignas(16) unsigned char shared[kShared];

  LB_JUMPS void yield() {
    if (__builtin_setjmp(fibers[running].resume_point) != 0) return;
    races::enter(seen);
    jump(scheduler);
  }
  /// Runs the fiber until it yields or ends.
  LB_JUMPS void resume(Fiber& fiber) {
    if (__builtin_setjmp(scheduler) != 0) return;
    races::enter(fiber.seen);
    if (fiber.started) jump(fiber.resume_point);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Machine::enter, 0);
    setcontext(&fiber.context);
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
  }

  /// Waits for all threads of the block.
  void block_barrier() {
    const races::Unseen unseen;
    const int64_t mine = block_generation;
    races::before(&order[mine & 1]);
    ++progress;
    if (++block_arrived == static_cast<int>(threads.x)) {
      block_arrived = 0;
      ++block_generation;
    }
    while (block_generation == mine) yield();
    races::after(&order[mine & 1]);
  }

  /// Gives a value to the other lanes of the warp and waits for theirs. Two buffers: a lane may be
  /// one exchange ahead. orders: whether the exchange also orders memory.
  const uint32_t* exchange(uint32_t mask, uint32_t value, bool orders = false) {
    const races::Unseen unseen;
    if (mask != 0xffffffffu) fail("only whole warps are emulated");
    Warp& warp = warps[running / 32];
    const int64_t mine = warp.generation;
    uint32_t* values = warp.value[mine & 1];
    values[running % 32] = value;
    if (orders) races::before(&warp.order[mine & 1]);
    ++progress;
    if (++warp.arrived == 32) {
      warp.arrived = 0;
      ++warp.generation;
    }
    while (warp.generation == mine) yield();
    if (orders) races::after(&warp.order[mine & 1]);
    return values;
  }

  static void enter();
  void run_block() {
    std::memset(shared, 0xff, sizeof shared);  // NaN, and indices far outside
    block_arrived = 0;
    for (Warp& warp : warps) warp = Warp{};
    for (Fiber& fiber : fibers) fiber.done = false;
    races::before(&begun);
    for (size_t left = threads.x; left > 0;) {
      const int64_t before = progress;
      for (size_t w = 0; w < warps.size(); ++w)
        left -= run_warp(backwards ? warps.size() - 1 - w : w);
      if (progress == before) fail("threads wait for each other at different barriers");
    }
    races::after(&ended);
  }

  /// Runs the threads of a warp until all have ended or wait for other warps. Returns how many
  /// ended.
  size_t run_warp(size_t warp) {
    size_t ended = 0;
    for (int64_t before = -1; before != progress;) {
      before = progress;
      for (size_t lane = 0; lane < 32; ++lane) {
        const size_t i = 32 * warp + (backwards ? 31 - lane : lane);
        if (fibers[i].done) continue;
        running = thread.x = static_cast<unsigned>(i);
        resume(fibers[i]);
        if (fibers[i].done) ++ended, ++progress;
      }
    }
    return ended;
  }

  void launch(Dim3 grid, Dim3 size, std::function<void()> body) {
    const races::Unseen unseen;
    if (size.x % 32 != 0) fail("a block must be whole warps");
    ++launches;
    seen = races::here();
    kernel = std::move(body);
    blocks = grid, threads = size;
    warps.assign(size.x / 32, Warp{});
    if (fibers.size() < size.x)
      fibers.resize(size.x);  // reused: the sanitizer limits the number of fibers
    for (Fiber& fiber : fibers) {
      if (fiber.stack) continue;
      fiber.stack = std::make_unique<char[]>(kStack);
      fiber.seen = races::fiber();
    }
    for (block.x = 0; block.x < grid.x; ++block.x) run_block();
  }
};

inline Machine machine;

/// What was asked of the runtime.
struct Calls {
  int64_t launches = 0;
  bool launches_run = true;  // else a launch is only counted
  bool capturing = false;
  std::vector<std::pair<void (*)(void*), void*>> graph;  // what the captured graph keeps
};
inline Calls calls;

/// A fiber runs one kernel after another.
inline void Machine::enter() {
  for (;;) {
    races::after(&machine.begun);
    machine.kernel();
    races::before(&machine.ended);
    const races::Unseen unseen;
    machine.fibers[machine.running].done = true;
    machine.yield();
  }
}

/// If set by a test, receives the reads and writes of parameters, gradients and state by fixed
/// kernels.
inline void (*moves)(const void* at, size_t bytes, bool written) = nullptr;

template <class T>
T& shared() {
  static_assert(sizeof(T) <= Machine::kShared);
  return *reinterpret_cast<T*>(machine.shared);
}

}  // namespace emulator

// ---- the language ----
#if defined(LOWBIT_SIMULATOR)  // kernels have the names and the parameters of their PTX
#include "simulator/cuda_simulator.h"
#define __global__ __attribute__((noinline, used, visibility("default")))
#define LB_ARGUMENT(Type) const Type
#else
#define __global__ static
#define LB_ARGUMENT(Type) const Type&
#endif
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define LB_UNROLL(times)
#define LB_NOINLINE static __attribute__((noinline, unused))
#define LB_SHARED(Type, name) Type& name = emulator::shared<Type>()
inline emulator::Dim3& threadIdx = emulator::machine.thread;
inline emulator::Dim3& blockIdx = emulator::machine.block;
inline emulator::Dim3& gridDim = emulator::machine.blocks;

inline void __syncthreads() { emulator::machine.block_barrier(); }
inline void __syncwarp() { emulator::machine.exchange(0xffffffffu, 0, true); }
inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int span) {
  return emulator::machine.exchange(
      mask, value)[(emulator::machine.running % 32) ^ static_cast<unsigned>(span)];
}
inline uint32_t __ballot_sync(uint32_t mask, bool yes) {
  const uint32_t* values = emulator::machine.exchange(mask, yes);
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= values[lane] << lane;
  return ballot;
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  const uint32_t* values = emulator::machine.exchange(mask, value);
  uint32_t largest = 0;
  for (int lane = 0; lane < 32; ++lane) largest = values[lane] > largest ? values[lane] : largest;
  return largest;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long x) {
  return __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
}
inline uint32_t atomicMax(uint32_t* at, uint32_t x) {
  uint32_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  if (x > old) __atomic_store_n(at, x, __ATOMIC_RELAXED);
  return old;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
template <class T>
T __ldcg(const T* at) {
  if (emulator::moves != nullptr) emulator::moves(at, sizeof(T), false);
  return *at;
}
template <class T>
void __stcg(T* at, T x) {
  if (emulator::moves != nullptr) emulator::moves(at, sizeof(T), true);
  *at = x;
}
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// ---- the runtime ----
using dim3 = emulator::Dim3;
using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidDeviceFunction,
  cudaErrorUnsupportedPtxVersion,
  cudaErrorInsufficientDriver
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
using cudaGraph_t = void*;
using cudaUserObject_t = std::pair<void (*)(void*), void*>*;
constexpr unsigned cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;
#define CUDART_VERSION 13000
struct cudaFuncAttributes {};
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int byte, size_t bytes, cudaStream_t) {
  std::memset(at, byte, bytes);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;  // so that a warp walks over many tiles
  return cudaSuccess;
}
template <class... Expected, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...),
                               Given&&... given) {
  ++emulator::calls.launches;
  if (emulator::calls.launches_run) {
#if defined(LOWBIT_SIMULATOR)
    emulator::simulate(*config, kernel, given...);
#else
    emulator::machine.launch(config->gridDim, config->blockDim, [&] { kernel(given...); });
#endif
  }
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                            unsigned long long*, cudaGraph_t*, const void*,
                                            const void*, size_t*) {
  *status = emulator::calls.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* owned, void (*end)(void*),
                                        unsigned, unsigned) {
  *object = new std::pair<void (*)(void*), void*>(end, owned);
  return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t object, unsigned,
                                             unsigned) {
  emulator::calls.graph.push_back(*object);
  delete object;
  return cudaSuccess;
}
