// Python's objects by the stable ABI of CPython 3.10: one module serves that version and later
// ones.
#pragma once

#include <Python.h>

#ifndef Py_LIMITED_API
#error "compile with Py_LIMITED_API: the module is of the stable ABI"
#endif

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lowbit::ckpt::python {

/// Thrown where Python's error indicator is set.
struct Raised {};

/// Owns a reference; empty only by default and after a move.
class Object {
 public:
  Object() = default;
  /// Takes over a new reference, as Python's functions return it; null throws Raised.
  explicit Object(PyObject* made) : object_(made) {
    if (made == nullptr) throw Raised();
  }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  /// A reference of its own to an object of somebody else's.
  static Object shared(PyObject* object) {
    Py_XINCREF(object);
    return Object(object);
  }
  PyObject* get() const { return object_; }
  /// Hands the reference over.
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

/// Throws Raised where a function of Python's returned an error.
inline void check(int result) {
  if (result != 0) throw Raised();
}

Object none();
Object boolean(bool value);
Object integer(int64_t value);
Object count(uint64_t value);
Object real(double value);
Object bytes(const std::string& value);
/// Text that need not be UTF-8: lone surrogates stay as they are.
Object text(const std::string& value);
/// The same with a sign in place of what is not text, for messages.
Object message(const std::string& value);

class List {
 public:
  List() : object_(PyList_New(0)) {}
  void append(const Object& item) { check(PyList_Append(object_.get(), item.get())); }
  Object done() && { return std::move(object_); }

 private:
  Object object_;
};

class Dict {
 public:
  Dict() : object_(PyDict_New()) {}
  void set(const char* key, const Object& value) {
    check(PyDict_SetItemString(object_.get(), key, value.get()));
  }
  void set(const Object& key, const Object& value) {
    check(PyDict_SetItem(object_.get(), key.get(), value.get()));
  }
  Object done() && { return std::move(object_); }

 private:
  Object object_;
};

Object tuple(std::vector<Object> items);
/// A tuple of what is given.
template <class... Items>
Object tuple_of(Items... items) {
  std::vector<Object> all;
  (all.push_back(std::move(items)), ...);
  return tuple(std::move(all));
}
/// A tuple, or a list, of what `make` makes of each item.
template <class Items, class Make>
Object tuple_by(const Items& items, const Make& make) {
  std::vector<Object> all;
  for (const auto& item : items) all.push_back(make(item));
  return tuple(std::move(all));
}
template <class Items, class Make>
Object list_by(const Items& items, const Make& make) {
  List out;
  for (const auto& item : items) out.append(make(item));
  return std::move(out).done();
}

/// A bytearray of so many bytes, and where they lie.
struct Buffer {
  explicit Buffer(uint64_t bytes);
  Object object;
  char* data;
};

/// Takes the arguments of a call apart, as PyArg_ParseTuple does.
template <class... T>
void parse(PyObject* arguments, const char* format, T... out) {
  if (PyArg_ParseTuple(arguments, format, out...) == 0) throw Raised();
}
/// The bytes of a `bytes`; anything else raises TypeError.
std::string bytes_of(PyObject* object);
/// The UTF-8 of a `str`.
std::string name_of(PyObject* object);
/// The whole numbers of a sequence.
std::vector<int64_t> integers_of(PyObject* object);

}  // namespace lowbit::ckpt::python
