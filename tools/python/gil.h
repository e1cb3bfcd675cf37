// Releases and takes Python's lock.
#pragma once

#include "python/object.h"

namespace lowbit::ckpt::python {

/// While it lives, other threads of Python run, and this one touches no object.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() { PyEval_RestoreThread(state_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

/// While it lives, this thread may touch objects; it had released the lock, or never had it.
class Held {
 public:
  Held() : state_(PyGILState_Ensure()) {}
  ~Held() { PyGILState_Release(state_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace lowbit::ckpt::python
