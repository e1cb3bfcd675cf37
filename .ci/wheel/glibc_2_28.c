// What g++ 12 and later take from a glibc newer than 2.28: linked into a wheel's libraries, seen by nothing else.
#include <pthread.h>
#include <stdarg.h>
#include <time.h>

// Since 2.32. False: shared pointers count atomically, also while there is one thread.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// Since 2.30. What is left of the time by one clock, as a time of the other.
__attribute__((visibility("hidden"))) int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                                                 const struct timespec* until) {
  struct timespec here, there;
  clock_gettime(clock, &here);
  clock_gettime(CLOCK_REALTIME, &there);
  there.tv_sec += until->tv_sec - here.tv_sec;
  there.tv_nsec += until->tv_nsec - here.tv_nsec;
  for (; there.tv_nsec < 0; --there.tv_sec) there.tv_nsec += 1000000000;
  for (; there.tv_nsec >= 1000000000; ++there.tv_sec) there.tv_nsec -= 1000000000;
  return pthread_cond_timedwait(condition, mutex, &there);
}

// Since 2.38, whose headers give these names to functions that also read binary numbers, such as 0b1. Those of before
// do not; nothing here reads any.
#define PLAIN(result, name, parameters, arguments)                                      \
  extern result plain_##name parameters __asm__(#name);                                 \
  __attribute__((visibility("hidden"))) result __isoc23_##name parameters {             \
    return plain_##name arguments;                                                      \
  }
PLAIN(long, strtol, (const char* text, char** end, int base), (text, end, base))
PLAIN(unsigned long, strtoul, (const char* text, char** end, int base), (text, end, base))
PLAIN(long long, strtoll, (const char* text, char** end, int base), (text, end, base))
PLAIN(unsigned long long, strtoull, (const char* text, char** end, int base), (text, end, base))
PLAIN(int, vsscanf, (const char* text, const char* format, va_list to), (text, format, to))

__attribute__((visibility("hidden"))) int __isoc23_sscanf(const char* text, const char* format, ...) {
  va_list to;
  va_start(to, format);
  const int read = plain_vsscanf(text, format, to);
  va_end(to);
  return read;
}
