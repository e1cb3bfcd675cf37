#include "python/errors.h"

namespace lowbit::ckpt::python {

void raise(const Error& error) {
  const Object module(PyImport_ImportModule("lowbit.checkpoint"));
  const Object type(PyObject_GetAttrString(module.get(), "CheckpointError"));
  std::vector<Object> said;
  said.push_back(message(error.text));
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
