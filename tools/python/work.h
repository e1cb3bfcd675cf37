// Work for Python: it runs in a thread of its own without the GIL, while the caller's thread
// answers for Python: it shows progress and looks for Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <string>

#include "container/common/writer.h"

namespace lowbit::ckpt::python {

/// Raises lowbit.checkpoint.CheckpointError.
[[noreturn]] void raise(const Error& error);

/// Runs `work` to its end. The progress function that it is given calls `callback` (None: nothing)
/// in the calling thread, at its first call, at its end and at most ten times a second in between;
/// `work` waits for the answer. False, an exception of the callback and KeyboardInterrupt ask the
/// work to stop; the exception goes on after it did. Errors become CheckpointError.
void run(const pybind11::object& callback, const std::function<Status(const Progress&)>& work);

/// The same for what has a result, converted by the caller.
template <class T>
T run_for(const pybind11::object& callback, const std::function<Result<T>(const Progress&)>& work) {
  T out{};
  run(callback, [&](const Progress& progress) -> Status {
    ASSIGN_OR_RETURN(made, work(progress));
    out = std::move(made);
    return fine();
  });
  return out;
}

/// What is short: no thread, only the GIL is released.
template <class F>
void without_gil(F&& work) {
  Status done = fine();
  {
    const pybind11::gil_scoped_release released;
    try {
      done = work();
    } catch (const std::exception& error) {
      done = failed(error.what());
    }
  }
  if (!done.ok()) raise(done.error());
}

}  // namespace lowbit::ckpt::python
