#include "python/object.h"

namespace lowbit::ckpt::python {
namespace {

Object decoded(const std::string& value, const char* errors) {
  return Object(PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), errors));
}

}  // namespace

Object none() { return Object::shared(Py_None); }
Object boolean(bool value) { return Object(PyBool_FromLong(value)); }
Object integer(int64_t value) { return Object(PyLong_FromLongLong(value)); }
Object count(uint64_t value) { return Object(PyLong_FromUnsignedLongLong(value)); }
Object real(double value) { return Object(PyFloat_FromDouble(value)); }
Object bytes(const std::string& value) {
  return Object(PyBytes_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size())));
}
Object text(const std::string& value) { return decoded(value, "surrogatepass"); }
Object message(const std::string& value) { return decoded(value, "replace"); }

Object tuple(std::vector<Object> items) {
  Object out(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  for (size_t i = 0; i < items.size(); ++i)
    check(PyTuple_SetItem(out.get(), static_cast<Py_ssize_t>(i), items[i].release()));
  return out;
}

Buffer::Buffer(uint64_t bytes)
    : object(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes))),
      data(PyByteArray_AsString(object.get())) {}

std::string bytes_of(PyObject* object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  check(PyBytes_AsStringAndSize(object, &data, &size));
  return {data, static_cast<size_t>(size)};
}

std::string name_of(PyObject* object) {
  const Object encoded(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass"));
  return bytes_of(encoded.get());
}

std::vector<int64_t> integers_of(PyObject* object) {
  const Py_ssize_t size = PySequence_Size(object);
  if (size < 0) throw Raised();
  std::vector<int64_t> out;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Object item(PySequence_GetItem(object, i));
    out.push_back(PyLong_AsLongLong(item.get()));
    if (out.back() == -1 && PyErr_Occurred() != nullptr) throw Raised();
  }
  return out;
}

}  // namespace lowbit::ckpt::python
