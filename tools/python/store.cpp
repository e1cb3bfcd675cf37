#include "io/read/store.h"
#include "io/text.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/module.h"

namespace lowbit::ckpt::python {
namespace {

/// The exception that Python has raised, as an error. object_store.py raises CheckpointError, whose
/// text says URL and reason.
Error raised_error() {
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) {
    keep_raised();
    return failed("interrupted");
  }
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Error out = failed("an object store failed");
  PyObject* said = value == nullptr ? nullptr : PyObject_Str(value);
  const char* text = said == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(said, nullptr);
  if (text != nullptr) out.text = text;
  PyObject* code = value == nullptr ? nullptr : PyObject_GetAttrString(value, "code");
  const long number = code == nullptr ? 0 : PyLong_AsLong(code);
  if (number >= 1 && number <= static_cast<long>(Exit::kMismatch))
    out.code = static_cast<Exit>(number);
  PyErr_Clear();
  for (PyObject* object : {said, code, type, value, traceback}) Py_XDECREF(object);
  return out;
}

/// Calls `work` under the GIL; an exception of Python's becomes an error.
template <class T, class Work>
Result<T> with_gil(const Work& work) {
  const Held held;
  try {
    return work();
  } catch (const Raised&) {
    return raised_error();
  }
}

/// (name, kind, size, version), kind 0: missing, 1: an object, 2: a folder.
StoreEntry entry_of(PyObject* given) {
  PyObject *name = nullptr, *version = nullptr;
  int kind = 0;
  unsigned long long size = 0;
  parse(given, "UiKU", &name, &kind, &size, &version);
  constexpr PathKind kKinds[] = {PathKind::kMissing, PathKind::kFile, PathKind::kFolder};
  return {name_of(name), kKinds[kind], size, name_of(version)};
}

/// Calls a method; null where it raised.
template <typename... Arguments>
PyObject* call_method(PyObject* object, const char* name, const char* format,
                      Arguments... arguments) {
  return call_python([&] { return PyObject_CallMethod(object, name, format, arguments...); });
}

class PythonLocation : public StoreLocation {
 public:
  explicit PythonLocation(Object location) : location_(std::move(location)) {}
  ~PythonLocation() override {
    const Held held;
    location_ = Object();
  }
  Result<StoreEntry> info(const std::string& name) override {
    return with_gil<StoreEntry>([&] {
      const Object said(call_method(location_.get(), "info", "s", name.c_str()));
      return entry_of(said.get());
    });
  }
  Result<std::vector<StoreEntry>> list() override {
    return with_gil<std::vector<StoreEntry>>([&] {
      const Object said(call_method(location_.get(), "list", nullptr));
      std::vector<StoreEntry> out;
      for (Py_ssize_t i = 0; i < PyList_Size(said.get()); ++i)
        out.push_back(entry_of(PyList_GetItem(said.get(), i)));
      return out;
    });
  }
  Result<std::string> read(const std::string& name, uint64_t begin, uint64_t end) override {
    return with_gil<std::string>([&] {
      const Object said(call_method(location_.get(), "read", "sKK", name.c_str(),
                                    static_cast<unsigned long long>(begin),
                                    static_cast<unsigned long long>(end)));
      return bytes_of(said.get());
    });
  }

 private:
  Object location_;
};

}  // namespace

void use_python_stores() {
  set_open_store([](const std::string& url) {
    return with_gil<std::shared_ptr<StoreLocation>>([&]() -> std::shared_ptr<StoreLocation> {
      const Object module(
          call_python([] { return PyImport_ImportModule("lowbit.checkpoint.object_store"); }));
      const Object given = bytes(url);
      return std::make_shared<PythonLocation>(
          Object(call_method(module.get(), "location", "O", given.get())));
    });
  });
}

}  // namespace lowbit::ckpt::python
