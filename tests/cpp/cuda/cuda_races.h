// Annotations of the emulator for the thread sanitizer, so that it judges kernels by CUDA's rules:
// each thread of a block is one of its fibers, barriers order memory, and shuffles and ballots do
// not. Accesses of the emulator itself are excluded. Without the sanitizer the annotations are
// empty.
//
// Blocks of a launch run one after another here, so races between blocks are not detected.
#pragma once

namespace emulator::races {

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);

inline int reports = 0;
// Called by the sanitizer, a library of its own, so these functions must be visible.
#define LB_CALLED __attribute__((used, visibility("default")))
LB_CALLED inline void __tsan_on_report(void*) { ++reports; }
LB_CALLED inline const char* __tsan_default_options() { return "exitcode=0:report_thread_leaks=0"; }
// Volatile reads are of words that other threads raise by atomic operations at the same time. Reads
// of a single word are as good as atomic on a GPU (--param=tsan-distinguish-volatile=1).
LB_CALLED inline void __tsan_volatile_read4(void*) {}
#undef LB_CALLED
}

constexpr bool kSeen = true;
inline void* here() { return __tsan_get_current_fiber(); }
inline void* fiber() { return __tsan_create_fiber(0); }
inline void enter(void* fiber) {
  __tsan_switch_to_fiber(fiber, 1);
}  // 1: the switch orders nothing
inline void before(void* at) { __tsan_release(at); }
inline void after(void* at) { __tsan_acquire(at); }
struct Unseen {
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};
#else
constexpr bool kSeen = false;
inline int reports = 0;
inline void* here() { return nullptr; }
inline void* fiber() { return nullptr; }
inline void enter(void*) {}
inline void before(void*) {}
inline void after(void*) {}
struct Unseen {
  Unseen() {}
};
#endif

}  // namespace emulator::races
