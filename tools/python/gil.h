// Python's lock, let go of.
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

}  // namespace lowbit::ckpt::python
