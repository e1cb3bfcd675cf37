// lowbit._tensors: what a repeated step must know of Python's objects, asked of thousands of them
// in C. It knows Python, by the stable ABI of CPython 3.10, and DLPack's C interface, by which
// torch says where a tensor is, and nothing else of torch. lowbit/step/cache.py calls it.
#include <ATen/dlpack.h>
#include <Python.h>

#include <cstring>

#include "core/pair.h"

#ifndef Py_LIMITED_API
#error "compile with Py_LIMITED_API: the module is of the stable ABI"
#endif

namespace lowbit::python {
namespace {

int (*dl_tensor)(void* object, DLTensor* out) = nullptr;  // torch's
PyObject* tensor_class = nullptr;                         // torch.Tensor, kept for good
PyObject* is_neg = nullptr;                               // torch.Tensor.is_neg, kept for good
PyObject* grad_name = nullptr;

/// open(torch.Tensor) -> whether its torch has DLPack's C interface. Called before all others.
PyObject* open(PyObject*, PyObject* type) {
  PyObject* const capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  const auto* api =
      static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);    // the class has it
  if (api == nullptr) {  // a capsule of another kind
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (api->header.version.major != DLPACK_MAJOR_VERSION ||
      api->dltensor_from_py_object_no_sync == nullptr)
    Py_RETURN_FALSE;
  grad_name = PyUnicode_InternFromString("grad");
  is_neg = PyObject_GetAttrString(type, "is_neg");
  if (grad_name == nullptr || is_neg == nullptr) return nullptr;
  dl_tensor = api->dltensor_from_py_object_no_sync;
  tensor_class = Py_NewRef(type);
  Py_RETURN_TRUE;
}

int64_t numel(const DLTensor& t) {
  int64_t count = 1;
  for (int d = 0; d < t.ndim; ++d) count *= t.shape[d];
  return count;
}
bool contiguous(const DLTensor& t) {
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides != nullptr && t.strides[d] != stride) return numel(t) == 0;
    stride *= t.shape[d];
  }
  return true;
}
/// A hash of the shape (FNV-1a over whole words).
uint64_t shape_of(const DLTensor& t) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int d = 0; d < t.ndim; ++d)
    hash = (hash ^ static_cast<uint64_t>(t.shape[d])) * 0x100000001b3;
  return hash;
}
uint32_t type_of(const DLTensor& t) {
  uint32_t type = 0;
  static_assert(sizeof(t.dtype) == sizeof(type));
  std::memcpy(&type, &t.dtype, sizeof(type));
  return type;
}
const void* address(const DLTensor& t) { return static_cast<char*>(t.data) + t.byte_offset; }

/// What torch says of a tensor. Returns false where it cannot say it, as of a sparse tensor, or
/// where the values are in no memory, as torch's lazy zeros are.
bool look(PyObject* object, DLTensor& t) {
  if (dl_tensor(object, &t) == 0) return t.data != nullptr || numel(t) == 0;
  PyErr_Clear();
  return false;
}

/// Whether memory holds a tensor's values as they are. Torch can negate lazily, by a bit of the
/// tensor of which its C interface says nothing.
bool literal(PyObject* tensor) {
  PyObject* const negated = PyObject_CallFunctionObjArgs(is_neg, tensor, nullptr);
  Py_XDECREF(negated);  // a bool, of which there are two
  PyErr_Clear();
  return negated == Py_False;
}

/// A table's rows, the parameters that they are of, their gradients or None, and the list that is
/// to hold the gradients, if any.
struct Table {
  PyObject *params, *grads, *held;
  TensorPair* rows;
  Py_ssize_t size;
  bool parse(PyObject* given) {
    PyObject* tensor;
    DLTensor t;
    if (!PyArg_ParseTuple(given, "O!OO|O!", &PyList_Type, &params, &grads, &tensor, &PyList_Type,
                          &held))
      return false;
    size = PyList_Size(params);
    if (grads != Py_None && (!PyList_Check(grads) || PyList_Size(grads) != size)) {
      PyErr_SetString(PyExc_ValueError, "grads must be None or a list as long as params");
      return false;
    }
    if (dl_tensor == nullptr) {
      PyErr_SetString(PyExc_RuntimeError, "open() was not called, or returned False");
      return false;
    }
    if (dl_tensor(tensor, &t) != 0) return false;
    const DLDataType int64 = {kDLInt, 64, 1};
    if (t.ndim != 2 || t.shape[0] != size || t.shape[1] != kPairColumns || !contiguous(t) ||
        t.device.device_type != kDLCPU || std::memcmp(&t.dtype, &int64, sizeof(int64)) != 0) {
      PyErr_SetString(PyExc_ValueError, "the table must be an int64 CPU tensor [n, columns]");
      return false;
    }
    rows = static_cast<TensorPair*>(const_cast<void*>(address(t)));
    return true;
  }
};

/// Gradient i as a new reference, where it is a plain tensor. Null without an error where it is
/// none.
PyObject* plain_gradient(const Table& table, Py_ssize_t i) {
  PyObject* const grad = table.grads == Py_None
                             ? PyObject_GetAttr(PyList_GetItem(table.params, i), grad_name)
                             : Py_NewRef(PyList_GetItem(table.grads, i));
  if (grad == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(grad)) == tensor_class) return grad;
  Py_DECREF(grad);
  return nullptr;
}

/// A walk over a list of objects, compared one after another with what is seen.
struct Before {
  PyObject* list;
  Py_ssize_t size, at = 0;
  bool is_next(PyObject* object) { return at < size && PyList_GetItem(list, at++) == object; }
};

/// same(before, containers) -> whether the items of lists and the values of dicts, one container
/// after another, are the objects of the list `before`.
PyObject* same(PyObject*, PyObject* given) {
  PyObject *list, *containers;
  if (!PyArg_ParseTuple(given, "O!O!:same", &PyList_Type, &list, &PyList_Type, &containers))
    return nullptr;
  Before before{list, PyList_Size(list)};
  const Py_ssize_t count = PyList_Size(containers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const container = PyList_GetItem(containers, i);
    if (PyList_Check(container)) {
      const Py_ssize_t size = PyList_Size(container);
      for (Py_ssize_t k = 0; k < size; ++k) {
        if (!before.is_next(PyList_GetItem(container, k))) Py_RETURN_FALSE;
      }
    } else if (PyDict_Check(container)) {
      Py_ssize_t at = 0;
      PyObject *key, *value;
      while (PyDict_Next(container, &at, &key, &value)) {
        if (!before.is_next(value)) Py_RETURN_FALSE;
      }
    } else {
      PyErr_SetString(PyExc_TypeError, "containers are lists and dicts");
      return nullptr;
    }
  }
  return PyBool_FromLong(before.at == before.size);
}

/// Writes the row of a parameter, or returns false if a row cannot describe it and its gradient.
bool record(PyObject* param, PyObject* grad, TensorPair& row) {
  DLTensor p, g;
  if (!look(param, p) || !look(grad, g) || !contiguous(p) || !contiguous(g) || !literal(param) ||
      !literal(grad))
    return false;
  row = {};
  row.param = address(p), row.grad = address(g), row.numel = numel(p), row.shape = shape_of(p);
  row.param_type = type_of(p), row.grad_type = type_of(g);
  row.device_type = p.device.device_type, row.device = p.device.device_id;
  row.kind = Py_TYPE(param);
  row.checksum = checksum_of(row);
  return numel(g) == row.numel && g.device.device_type == row.device_type &&
         g.device.device_id == row.device;
}

/// Takes the addresses of a parameter and its gradient, if nothing else has changed.
bool take(PyObject* param, PyObject* grad, TensorPair& row) {
  DLTensor t;
  const auto fits = [&](uint32_t type) {
    return type_of(t) == type && numel(t) == row.numel && t.device.device_id == row.device &&
           t.device.device_type == row.device_type && contiguous(t);
  };
  if (!look(grad, t) || !fits(row.grad_type)) return false;
  const void* const at = address(t);
  if (!look(param, t) || !fits(row.param_type) || shape_of(t) != row.shape) return false;
  // To ask takes some 80 ns. A parameter is asked again only where it was given other memory.
  const bool good = literal(grad) && (row.param == address(t) || literal(param));
  row.param = address(t), row.grad = at;
  row.checksum = checksum_of(row);
  return good;
}

/// For each parameter and its gradient row(param, grad, row), which says whether to continue, if
/// known(param, row).
template <class Known, class Row>
PyObject* each(PyObject* given, Known&& known, Row&& row) {
  Table table{};
  if (!table.parse(given)) return nullptr;
  for (Py_ssize_t i = 0; i < table.size; ++i) {
    PyObject* const param = PyList_GetItem(table.params, i);
    // First: reading an attribute of a class that is not torch's may run anything.
    if (!known(param, table.rows[i])) Py_RETURN_FALSE;
    PyObject* const grad = plain_gradient(table, i);
    if (grad == nullptr && PyErr_Occurred() != nullptr) return nullptr;
    const bool good = grad != nullptr && row(param, grad, table.rows[i]);
    const bool lost = good && table.held != nullptr && PyList_Append(table.held, grad) != 0;
    Py_XDECREF(grad);
    if (lost) return nullptr;
    if (!good) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

/// record(params, grads, table) -> whether the table, an int64 CPU tensor [n, columns], now
/// describes the parameters, which are torch's own tensors or parameters, and their gradients;
/// None: their own.
PyObject* record_all(PyObject*, PyObject* given) {
  return each(given, [](PyObject*, const TensorPair&) { return true; }, record);
}

/// take(params, grads, table, held) -> whether the parameters and their gradients are as the table
/// has them but for where they are, which it then has. If not, some rows have it and some have not.
/// The list `held` gets the gradients: the table has addresses alone, and a parameter may lose its
/// gradient in another thread while a step reads it.
PyObject* take_all(PyObject*, PyObject* given) {
  const auto known = [](PyObject* param, const TensorPair& row) {
    return Py_TYPE(param) == row.kind;
  };
  return each(given, known, take);
}

PyMethodDef functions[] = {
    {"open", open, METH_O, "open(torch.Tensor) -> whether the functions on tensors work"},
    {"same", same, METH_VARARGS, "same(before, containers) -> whether they hold these objects"},
    {"record", record_all, METH_VARARGS,
     "record(params, grads, table) -> whether it describes them"},
    {"take", take_all, METH_VARARGS,
     "take(params, grads, table, held) -> whether it still describes them"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "lowbit._tensors",
                      "What a repeated step must know of Python's objects.",
                      -1,
                      functions,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace
}  // namespace lowbit::python

PyMODINIT_FUNC PyInit__tensors() {
  PyObject* const made = PyModule_Create(&lowbit::python::module);
  if (made != nullptr) PyModule_AddIntConstant(made, "COLUMNS", lowbit::kPairColumns);
  return made;
}
