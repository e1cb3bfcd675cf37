#include "python/errors.h"

namespace lowbit::ckpt::python {
namespace {

struct Kept {
  PyObject *type, *value, *traceback;
};
// Plain pointers: a thread that ends without the GIL frees no object.
thread_local Kept kept_raised = {nullptr, nullptr, nullptr};

/// The words of the command line are not those of its functions.
std::string in_python(std::string text) {
  constexpr std::string_view kShell = "--force replaces it", kHere = "force=True replaces it";
  if (text.ends_with(kShell)) text.replace(text.size() - kShell.size(), kShell.size(), kHere);
  return text;
}

}  // namespace

void keep_raised() {
  Kept now{};
  PyErr_Fetch(&now.type, &now.value, &now.traceback);
  if (kept_raised.type == nullptr) {
    kept_raised = now;
    return;
  }
  Py_XDECREF(now.type);
  Py_XDECREF(now.value);
  Py_XDECREF(now.traceback);
}

void raise_kept() {
  if (kept_raised.type == nullptr) return;
  const Kept now = std::exchange(kept_raised, {});
  PyErr_Restore(now.type, now.value, now.traceback);
  throw Raised();
}

void raise(const Error& error) {
  const Object module(PyImport_ImportModule("lowbit.checkpoint"));
  const Object type(PyObject_GetAttrString(module.get(), "CheckpointError"));
  std::vector<Object> said;
  said.push_back(message(in_python(error.text)));
  said.push_back(integer(static_cast<int>(error.code)));
  for (const std::string* place : {&error.file, &error.item, &error.tensor})
    said.push_back(message(*place));
  const Object made(PyObject_CallObject(type.get(), tuple(std::move(said)).get()));
  PyErr_SetObject(type.get(), made.get());
  throw Raised();
}

void raise(PyObject* type, const std::string& text) {
  PyErr_SetObject(type, message(text).get());
  throw Raised();
}

}  // namespace lowbit::ckpt::python
