// Work for Python: it runs in a thread of its own without the GIL, while the caller's thread
// answers for Python: it shows progress and looks for Ctrl-C.
#pragma once

#include <functional>
#include <string>

#include "container/document/writer.h"
#include "python/errors.h"
#include "python/gil.h"

namespace lowbit::ckpt::python {

/// Runs `work` to its end. The progress function that it is given calls `callback` (None: nothing)
/// in the calling thread, at its first call, at its end and at most ten times a second in between;
/// `work` waits for the answer. False, an exception of the callback and KeyboardInterrupt ask the
/// work to stop; the exception is raised after it did. Errors become CheckpointError.
void run(PyObject* callback, const std::function<Status(const Progress&)>& work);

/// What is short: no thread, only the GIL is released.
template <class F>
void without_gil(F&& work) {
  Status done = fine();
  {
    const Released released;
    try {
      done = work();
    } catch (const std::exception& error) {
      done = failed(error.what());
    }
  }
  raise_kept();
  if (!done.ok()) raise(done.error());
}

}  // namespace lowbit::ckpt::python
