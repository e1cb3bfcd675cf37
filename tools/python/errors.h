// The one place where errors of C++ become exceptions of Python.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "io/status.h"
#include "python/object.h"

namespace lowbit::ckpt::python {

/// The words of the command line are not those of its functions: "--model PATH" is model=PATH here,
/// and "--to torch" is to='torch'.
std::string in_python(const std::string& text);

/// Raises lowbit.checkpoint.CheckpointError.
[[noreturn]] void raise(const Error& error);
/// Raises one of Python's own exceptions: `raise(PyExc_ValueError, "...")`.
[[noreturn]] void raise(PyObject* type, const std::string& text);

/// Keeps the exception that Python has raised in this thread, where it must wait for C++ to return;
/// what is not an error of the work: KeyboardInterrupt, SystemExit.
void keep_raised();
/// Raises what was kept in this thread, if anything was.
void raise_kept();

/// Calls what Python called. An exception of C++ becomes one of Python's, and `failure` is
/// returned.
template <class F, class T>
T guarded(F&& work, T failure) noexcept {
  try {
    return work();
  } catch (const Raised&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failure;
}

/// The same of a function that returns an object.
template <class F>
PyObject* guarded(F&& work) noexcept {
  return guarded([&] { return work().release(); }, static_cast<PyObject*>(nullptr));
}

}  // namespace lowbit::ckpt::python
