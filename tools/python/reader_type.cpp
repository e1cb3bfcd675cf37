#include <optional>
#include <string>
#include <utility>

#include "python/errors.h"
#include "python/module.h"
#include "python/reader.h"

namespace lowbit::ckpt::python {
namespace {

/// What Python allocates.
struct Instance {
  PyObject_HEAD Reader* reader;
};

Reader& reader_of(PyObject* self) { return *reinterpret_cast<Instance*>(self)->reader; }

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&] {
    PyObject *path = nullptr, *meant = Py_None;
    parse(arguments, "S|O:Reader", &path, &meant);
    std::optional<std::string> optimizer;
    if (meant != Py_None) optimizer = name_of(meant);
    Object self(PyType_GenericAlloc(type, 0));
    reinterpret_cast<Instance*>(self.get())->reader =
        new Reader(bytes_of(path), std::move(optimizer));
    return self;
  });
}

void drop(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Instance*>(self)->reader;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

Object read(Reader& reader, PyObject* arguments) {
  Py_ssize_t tensor = 0;
  int part = 0;
  PyObject *offset = nullptr, *shape = nullptr;
  parse(arguments, "niOO:read", &tensor, &part, &offset, &shape);
  return reader.read(static_cast<size_t>(tensor), part, integers_of(offset), integers_of(shape));
}

Object read_state(Reader& reader, PyObject* arguments) {
  Py_ssize_t param = 0, state = 0, first = 0, count = 0;
  parse(arguments, "nnnn:read_state", &param, &state, &first, &count);
  return reader.read_state(static_cast<size_t>(param), static_cast<size_t>(state), first, count);
}

Object read_state_box(Reader& reader, PyObject* arguments) {
  Py_ssize_t param = 0, state = 0;
  PyObject *offset = nullptr, *shape = nullptr;
  parse(arguments, "nnOO:read_state_box", &param, &state, &offset, &shape);
  return reader.read_state_box(static_cast<size_t>(param), static_cast<size_t>(state),
                               integers_of(offset), integers_of(shape));
}

Object read_own(Reader& reader, PyObject* arguments) {
  Py_ssize_t param = 0, state = 0, tensor = 0;
  PyObject *offset = nullptr, *shape = nullptr;
  parse(arguments, "nnnOO:read_own", &param, &state, &tensor, &offset, &shape);
  return reader.read_own(static_cast<size_t>(param), static_cast<size_t>(state),
                         static_cast<size_t>(tensor), integers_of(offset), integers_of(shape));
}

Object read_codes(Reader& reader, PyObject* arguments) {
  Py_ssize_t param = 0, state = 0, begin = 0, end = 0;
  int scales = 0;
  parse(arguments, "nnnnp:read_codes", &param, &state, &begin, &end, &scales);
  return reader.read_codes(static_cast<size_t>(param), static_cast<size_t>(state), begin, end,
                           scales != 0);
}

Object tell_shape(Reader& reader, PyObject* arguments) {
  Py_ssize_t param = 0;
  PyObject* shape = nullptr;
  parse(arguments, "nO:tell_shape", &param, &shape);
  reader.tell_shape(static_cast<size_t>(param), integers_of(shape));
  return none();
}

Object value_item(Reader& reader, PyObject* arguments) {
  PyObject* name = nullptr;
  int verify = 1;
  parse(arguments, "Up:value_item", &name, &verify);
  return reader.value_item(name_of(name), verify != 0);
}

Object read_into(Reader& reader, PyObject* arguments) {
  PyObject *wanted = nullptr, *progress = nullptr;
  int threads = 1, verify = 1;
  parse(arguments, "O!ipO:read_into", &PyList_Type, &wanted, &threads, &verify, &progress);
  std::vector<Reader::Want> out;
  for (Py_ssize_t i = 0; i < PyList_Size(wanted); ++i) {
    PyObject *name = nullptr, *offset = nullptr, *shape = nullptr;
    unsigned long long address = 0, bytes = 0;
    parse(PyList_GetItem(wanted, i), "UOOKK", &name, &offset, &shape, &address, &bytes);
    out.push_back({name_of(name), integers_of(offset), integers_of(shape),
                   reinterpret_cast<char*>(static_cast<uintptr_t>(address)), bytes});
  }
  return reader.read_into(out, threads, verify != 0, progress);
}

/// A method with arguments, as Python calls it.
template <Object (*function)(Reader&, PyObject*)>
PyObject* method(PyObject* self, PyObject* arguments) {
  return guarded([&] { return function(reader_of(self), arguments); });
}

/// One without.
template <auto member>
PyObject* plain(PyObject* self, PyObject*) {
  return guarded([&] { return (reader_of(self).*member)(); });
}

PyMethodDef kMethods[] = {
    {"container", plain<&Reader::container>, METH_NOARGS, nullptr},
    {"optimizers", plain<&Reader::optimizers>, METH_NOARGS, nullptr},
    {"tensors", plain<&Reader::tensors>, METH_NOARGS, nullptr},
    {"values", plain<&Reader::values>, METH_NOARGS, nullptr},
    {"opaque", plain<&Reader::opaque>, METH_NOARGS, nullptr},
    {"model", plain<&Reader::model>, METH_NOARGS, nullptr},
    {"tell_shape", method<tell_shape>, METH_VARARGS, "tell_shape(param, shape)"},
    {"finish", plain<&Reader::finish>, METH_NOARGS, nullptr},
    {"mapped", plain<&Reader::mapped>, METH_NOARGS, nullptr},
    {"layout", plain<&Reader::layout>, METH_NOARGS, nullptr},
    {"value_item", method<value_item>, METH_VARARGS, "value_item(name, verify)"},
    {"read_into", method<read_into>, METH_VARARGS, "read_into(wanted, threads, verify, progress)"},
    {"read", method<read>, METH_VARARGS, "read(tensor, part, offset, shape)"},
    {"read_state", method<read_state>, METH_VARARGS, "read_state(param, state, first, count)"},
    {"read_state_box", method<read_state_box>, METH_VARARGS,
     "read_state_box(param, state, offset, shape)"},
    {"read_own", method<read_own>, METH_VARARGS, "read_own(param, state, tensor, offset, shape)"},
    {"read_codes", method<read_codes>, METH_VARARGS,
     "read_codes(param, state, begin, end, scales)"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kTypeSlots[] = {
    {Py_tp_doc, const_cast<char*>("Reader(path: bytes): a checkpoint, opened")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};

PyType_Spec kSpec = {"lowbit._checkpoint.Reader", sizeof(Instance), 0, Py_TPFLAGS_DEFAULT,
                     kTypeSlots};

}  // namespace

Object make_reader_type() { return Object(PyType_FromSpec(&kSpec)); }

}  // namespace lowbit::ckpt::python
