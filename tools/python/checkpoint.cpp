// lowbit._checkpoint: what lowbit-ckpt does, for Python. lowbit/checkpoint/commands.py and
// lowbit/checkpoint/checkpoint.py document it and have the defaults.
#include "container/dcp/value_archive.h"
#include "io/hash.h"
#include "io/stream_copy.h"
#include "io/text.h"
#include "io/write/checkpoint_folder.h"
#include "io/write/new_directory.h"
#include "io/write/partial_name.h"
#include "python/module.h"
#include "python/options.h"
#include "python/work.h"

namespace lowbit::ckpt::python {
namespace {

/// What a command is called with: paths as bytes, the options as JSON, and the progress callback.
template <size_t kPaths>
struct Arguments {
  explicit Arguments(PyObject* given) {
    if (PyTuple_Size(given) != static_cast<Py_ssize_t>(kPaths) + 2)
      raise(PyExc_TypeError,
            "expected " + std::to_string(kPaths) + " paths, options and a progress callback");
    for (size_t i = 0; i < kPaths; ++i)
      paths[i] = bytes_of(PyTuple_GetItem(given, static_cast<Py_ssize_t>(i)));
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(given, kPaths), &size);
    if (text == nullptr) throw Raised();
    options.assign(text, static_cast<size_t>(size));
    callback = PyTuple_GetItem(given, kPaths + 1);
  }
  std::string paths[kPaths];
  std::string options;
  PyObject* callback;
};

/// Calls a command: `work(paths, options)`. The report is text, which Python's own json reads.
template <class Options, size_t kPaths, class Work>
PyObject* call_command(PyObject* given, const Work& work) {
  return guarded([&] {
    const Arguments<kPaths> to(given);
    auto options = options_of<Options>(to.options);
    std::string out;
    run(to.callback, [&](const Progress& progress) -> Status {
      if constexpr (requires { options.write; }) {
        options.write.progress = progress;
      } else {
        options.progress = progress;
      }
      ASSIGN_OR_RETURN(made, work(to.paths, options));
      if (made.contains("warnings"))
        for (Json& line : made["warnings"]) line = in_python(line.get<std::string>());
      out = made.dump(-1, ' ', false, Json::error_handler_t::replace);
      return fine();
    });
    return text(out);
  });
}

PyObject* call_inspect(PyObject*, PyObject* given) {
  return call_command<InspectOptions, 1>(
      given, [](const auto& paths, const auto& options) { return inspect(paths[0], options); });
}

PyObject* call_verify(PyObject*, PyObject* given) {
  return call_command<VerifyOptions, 1>(
      given, [](const auto& paths, const auto& options) { return verify(paths[0], options); });
}

PyObject* call_convert(PyObject*, PyObject* given) {
  return call_command<ConvertOptions, 3>(given, [](const auto& paths, auto& options) {
    options.model = paths[2];
    return convert(paths[0], paths[1], options);
  });
}

PyObject* call_reshard(PyObject*, PyObject* given) {
  return call_command<ReshardOptions, 2>(given, [](const auto& paths, const auto& options) {
    return reshard(paths[0], paths[1], options);
  });
}

PyObject* call_diff(PyObject*, PyObject* given) {
  return call_command<DiffOptions, 3>(given, [](const auto& paths, auto& options) {
    options.model = paths[2];
    return diff(paths[0], paths[1], options);
  });
}

/// (path, replace): an error where a folder of that name could not be published.
PyObject* call_check_target(PyObject*, PyObject* given) {
  return guarded([&] {
    PyObject* path = nullptr;
    int replace = 0;
    parse(given, "Sp:check_target", &path, &replace);
    const auto kind = NewDirectory::Kind::kSave;
    if (const Status s = NewDirectory::check(bytes_of(path), replace != 0, kind); !s.ok())
      raise(s.error());
    return none();
  });
}

/// (path): the N that files __RANK_N.distcp must have between the other files of that folder; -1
/// where they will have a folder of their own.
PyObject* call_file_number(PyObject*, PyObject* given) {
  return guarded([&] {
    PyObject* path = nullptr;
    parse(given, "S:file_number", &path);
    const auto number = NewDirectory::file_number(bytes_of(path));
    if (!number.ok()) raise(number.error());
    return integer(number.value() ? static_cast<long long>(*number.value()) : -1);
  });
}

/// (temporary, path, replace, sync, number): publishes a complete folder; number: as file_number
/// said.
PyObject* call_publish(PyObject*, PyObject* given) {
  return guarded([&] {
    PyObject *temporary = nullptr, *path = nullptr;
    int replace = 0, sync = 1;
    long long number = -1;
    parse(given, "SSppL:publish", &temporary, &path, &replace, &sync, &number);
    const auto named = number < 0 ? std::nullopt : std::optional<uint64_t>(number);
    const std::string from = bytes_of(temporary), to = bytes_of(path);
    without_gil([&]() -> Status {
      ASSIGN_OR_RETURN(folder, NewDirectory::adopt(to, from, replace != 0, named));
      return folder->commit(sync != 0);
    });
    return none();
  });
}

/// (there, data, digests): the steps of a publication as JSON, [put, name] each; the first two are
/// JSON lists of names.
PyObject* call_publication(PyObject*, PyObject* given) {
  return guarded([&] {
    const char *there = nullptr, *data = nullptr;
    int digests = 0;
    parse(given, "ssp:publication", &there, &data, &digests);
    Json steps = Json::array();
    for (const auto& [kind, name] :
         publication(Json::parse(there), Json::parse(data), digests != 0))
      steps.push_back({kind == PublicationStep::kPut, name});
    return text(steps.dump());
  });
}

/// (name): the hidden name of a folder while it is saved: the same on every rank.
PyObject* call_saving_name(PyObject*, PyObject* given) {
  return guarded([&] {
    PyObject* name = nullptr;
    parse(given, "S:saving_name", &name);
    return bytes(partial_stem(bytes_of(name)) + std::string(kSaving));
  });
}

/// Bytes of the caller's, read as a file.
class Lent : public File {
 public:
  Lent(std::string_view bytes, std::string name)
      : File({.size = bytes.size()}, std::move(name)), bytes_(bytes) {}

 private:
  Status fetch(uint64_t offset, char* out, uint64_t bytes) const override {
    bytes_.copy(out, bytes, offset);
    return fine();
  }
  std::string_view bytes_;
};

/// (name, archive): an error where Reader could not load the value that torch.save wrote there.
PyObject* call_check_value(PyObject*, PyObject* given) {
  return guarded([&] {
    PyObject *name = nullptr, *archive = nullptr;
    char* begin = nullptr;
    Py_ssize_t size = 0;
    if (PyArg_ParseTuple(given, "US:check_value", &name, &archive) == 0 ||
        PyBytes_AsStringAndSize(archive, &begin, &size) < 0)
      throw Raised();
    const std::string what = printable(name_of(name));
    const std::string_view item(begin, static_cast<size_t>(size));
    without_gil(
        [&] { return check_value_archive(Lent(item, what), {.length = item.size()}, what); });
    return none();
  });
}

/// (bytes): their XXH3-128 digest.
PyObject* call_digest(PyObject*, PyObject* given) {
  return guarded([&] {
    char* begin = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(given, &begin, &size) < 0) throw Raised();
    return text(digest_of({begin, static_cast<size_t>(size)}));
  });
}

/// (copies, threads): copies memory; each of `copies` is (address to, address from, bytes).
PyObject* call_copy_memory(PyObject*, PyObject* given) {
  return guarded([&] {
    PyObject* list = nullptr;
    int threads = 1;
    parse(given, "O!i:copy_memory", &PyList_Type, &list, &threads);
    std::vector<MemoryCopy> copies;
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
      unsigned long long to = 0, from = 0, bytes = 0;
      parse(PyList_GetItem(list, i), "KKK", &to, &from, &bytes);
      copies.push_back({reinterpret_cast<char*>(static_cast<uintptr_t>(to)),
                        reinterpret_cast<const char*>(static_cast<uintptr_t>(from)), bytes});
    }
    without_gil([&] { return stream_copy(copies, threads); });
    return none();
  });
}

PyMethodDef kFunctions[] = {
    {"inspect", call_inspect, METH_VARARGS, "inspect(path, options, progress)"},
    {"verify", call_verify, METH_VARARGS, "verify(path, options, progress)"},
    {"convert", call_convert, METH_VARARGS, "convert(source, target, model, options, progress)"},
    {"reshard", call_reshard, METH_VARARGS, "reshard(source, target, options, progress)"},
    {"diff", call_diff, METH_VARARGS, "diff(a, b, model, options, progress)"},
    {"check_target", call_check_target, METH_VARARGS, "check_target(path, replace)"},
    {"file_number", call_file_number, METH_VARARGS, "file_number(path)"},
    {"publish", call_publish, METH_VARARGS, "publish(temporary, path, replace, sync, number)"},
    {"publication", call_publication, METH_VARARGS, "publication(there, data, digests)"},
    {"check_value", call_check_value, METH_VARARGS, "check_value(name, archive)"},
    {"digest", call_digest, METH_O, "digest(bytes)"},
    {"copy_memory", call_copy_memory, METH_VARARGS, "copy_memory(copies, threads)"},
    {"saving_name", call_saving_name, METH_VARARGS, "saving_name(name)"},
    {nullptr, nullptr, 0, nullptr},
};

int fill(PyObject* module) {
  return guarded(
      [&] {
        use_python_stores();
        const Object reader = make_reader_type(), file = make_rank_file_type();
        check(PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(reader.get())));
        return PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(file.get()));
      },
      -1);
}

PyModuleDef_Slot kModuleSlots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT,
    "_checkpoint",
    "Checkpoints read, checked and rewritten in C++; use lowbit.checkpoint",
    0,
    kFunctions,
    kModuleSlots,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace
}  // namespace lowbit::ckpt::python

PyMODINIT_FUNC PyInit__checkpoint() { return PyModuleDef_Init(&lowbit::ckpt::python::kModule); }
