// What g++ 12 takes from a glibc newer than 2.28: linked into a wheel's libraries, seen by nothing else.
#include <pthread.h>
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
