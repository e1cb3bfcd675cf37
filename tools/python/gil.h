// Releases and takes Python's lock.
#pragma once

#include <unistd.h>

#include "python/object.h"

namespace lowbit::ckpt::python {

/// Calls a function of CPython that takes the lock, or runs Python code, which gives the lock up
/// and takes it again. An interpreter that is shutting down never gives it to this thread: before
/// 3.14 CPython ends the thread instead (pthread_exit), which unwinds its frames, and a destructor
/// on the way, or a std::thread that nobody has joined, ends the process with "terminate called
/// without an active exception". So the thread sleeps until the process is gone, as it does from
/// 3.14 on.
template <typename Call>
auto call_python(Call call) noexcept {
  try {
    return call();
  } catch (...) {
    while (true) pause();
  }
}

/// While it lives, other threads of Python run, and this one touches no object.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() {
    call_python([this] { PyEval_RestoreThread(state_); });
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

/// While it lives, this thread may touch objects; it had released the lock, or never had it.
class Held {
 public:
  Held() : state_(call_python(PyGILState_Ensure)) {}
  ~Held() { PyGILState_Release(state_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace lowbit::ckpt::python
