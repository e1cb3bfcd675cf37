#include "container/dcp/rank_file.h"
#include "python/errors.h"
#include "python/module.h"
#include "python/work.h"

namespace lowbit::ckpt::python {
namespace {

constexpr size_t kMaxDimensions = 64;  // torch has as many

/// What Python allocates.
struct FileInstance {
  PyObject_HEAD std::shared_ptr<RankFile>* file;
};

RankFile& file_of(PyObject* self) { return **reinterpret_cast<FileInstance*>(self)->file; }

PyObject* make_file(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&] {
    PyObject *folder = nullptr, *name = nullptr;
    int will_sync = 1;
    parse(arguments, "SSp:RankFile", &folder, &name, &will_sync);
    auto made = RankFile::create(bytes_of(folder), bytes_of(name), will_sync != 0);
    if (!made.ok()) raise(made.error());
    Object self(PyType_GenericAlloc(type, 0));
    reinterpret_cast<FileInstance*>(self.get())->file =
        new std::shared_ptr<RankFile>(std::move(made.value()));
    return self;
  });
}

void drop_file(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<FileInstance*>(self)->file;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/// (name, dtype, shape, address), or (name, bytes of an item).
RankItem item_of(PyObject* given) {
  RankItem out;
  PyObject *name = nullptr, *second = nullptr, *shape = nullptr;
  unsigned long long address = 0;
  if (PyTuple_Size(given) == 2) {
    parse(given, "US", &name, &second);
    out.archive = bytes_of(second);
  } else {
    parse(given, "UUOK", &name, &second, &shape, &address);
    const std::string dtype = name_of(second);
    out.dtype = find_dtype(dtype);
    if (out.dtype == nullptr) raise(PyExc_TypeError, "tensors of " + dtype + " are not written");
    out.shape = integers_of(shape);
    // The item's pickle, which names each dimension, then fits what WriteRun copies.
    if (out.shape.size() > kMaxDimensions)
      raise(PyExc_ValueError, "tensors of more than " + std::to_string(kMaxDimensions) +
                                  " dimensions are not written");
    out.data = reinterpret_cast<const char*>(static_cast<uintptr_t>(address));
  }
  out.name = name_of(name);
  return out;
}

PyObject* write_file(PyObject* self, PyObject* arguments) {
  return guarded([&] {
    PyObject *given = nullptr, *progress = nullptr;
    int threads = 1;
    parse(arguments, "O!iO:write", &PyList_Type, &given, &threads, &progress);
    std::vector<RankItem> items;
    for (Py_ssize_t i = 0; i < PyList_Size(given); ++i)
      items.push_back(item_of(PyList_GetItem(given, i)));
    std::vector<RankWritten> written;
    run(progress, [&](const Progress& told) -> Status {
      ASSIGN_OR_RETURN(done, file_of(self).write(items, threads, told));
      written = std::move(done);
      return fine();
    });
    return list_by(written, [](const RankWritten& w) {
      return tuple_of(count(w.offset), count(w.length), text(w.digest.whole),
                      count(w.digest.grid.down), count(w.digest.grid.across), text(w.digest.tiles));
    });
  });
}

PyObject* sync_file(PyObject* self, PyObject*) {
  return guarded([&] {
    without_gil([&] { return file_of(self).sync(); });
    return none();
  });
}

PyObject* clear_file(PyObject* self, PyObject*) {
  return guarded([&] {
    file_of(self).clear();
    return none();
  });
}

PyMethodDef kFileMethods[] = {
    {"write", write_file, METH_VARARGS,
     "write(items, threads, progress): [(offset, length, digest, down, across, tiles), ...]"},
    {"sync", sync_file, METH_NOARGS, nullptr},
    {"clear", clear_file, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kFileSlots[] = {
    {Py_tp_doc,
     const_cast<char*>("RankFile(folder: bytes, name: bytes, will_sync: bool): a new file")},
    {Py_tp_new, reinterpret_cast<void*>(make_file)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_file)},
    {Py_tp_methods, kFileMethods},
    {0, nullptr},
};

PyType_Spec kFileSpec = {"lowbit._checkpoint.RankFile", sizeof(FileInstance), 0, Py_TPFLAGS_DEFAULT,
                         kFileSlots};

}  // namespace

Object make_rank_file_type() { return Object(PyType_FromSpec(&kFileSpec)); }

}  // namespace lowbit::ckpt::python
