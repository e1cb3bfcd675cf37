// In a file of its own, so that no arithmetic of a caller is moved across a change.
#include "cpu/float_environment.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace lowbit::cpu {
namespace {

#if defined(__x86_64__)
constexpr unsigned long long kDefault = 0x1f80;  // MXCSR: exceptions masked, nothing flushed
constexpr unsigned long long kFlags = 0x3f;      // what has happened, which changes no result
unsigned long long get() { return _mm_getcsr(); }
void set(unsigned long long to) { _mm_setcsr(static_cast<unsigned>(to)); }
#elif defined(__aarch64__)
constexpr unsigned long long kDefault = 0, kFlags = 0;  // FPCR; the flags are in FPSR
unsigned long long get() {
  unsigned long long fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  return fpcr;
}
void set(unsigned long long to) { asm volatile("msr fpcr, %0" : : "r"(to)); }
#else  // the rounding, which is all that C++ knows of
constexpr unsigned long long kDefault = FE_TONEAREST, kFlags = 0;
unsigned long long get() { return static_cast<unsigned long long>(std::fegetround()); }
void set(unsigned long long to) { std::fesetround(static_cast<int>(to)); }
#endif

bool differs(unsigned long long from) { return (from & ~kFlags) != kDefault; }

}  // namespace

FloatEnvironment::FloatEnvironment() : was_(get()) {
  if (differs(was_)) set(kDefault);
}

FloatEnvironment::~FloatEnvironment() {
  if (differs(was_)) set(was_);
}

}  // namespace lowbit::cpu
