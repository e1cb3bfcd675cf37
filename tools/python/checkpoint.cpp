// lowbit._checkpoint: what lowbit-ckpt does, for Python. lowbit/checkpoint/commands.py and lowbit/checkpoint/reader.py
// document it and have the defaults.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "pipeline/commands.h"
#include "python/reader.h"
#include "python/work.h"

namespace py = pybind11;

namespace lowbit::ckpt::python {
namespace {

using Names = std::vector<std::string>;

/// The report of a command as text, which Python's own json reads.
std::string report(const py::object& callback,
                   const std::function<Result<Json>(const Progress&)>& work) {
  return run_for<std::string>(callback, [&](const Progress& progress) -> Result<std::string> {
    ASSIGN_OR_RETURN(made, work(progress));
    return made.dump(-1, ' ', false, Json::error_handler_t::replace);
  });
}

/// What all commands that write have in common, but for their progress.
void add_writing(py::module_& m) {
  py::class_<WriteOptions>(m, "Writing")
      .def(py::init([](bool replace, bool manifest, int threads, uint64_t memory,
                       std::vector<int64_t> parts, std::vector<int> dims) {
             WriteOptions out;
             out.replace = replace;
             out.manifest = manifest;
             out.threads = threads;
             out.memory = memory;
             out.mesh = {std::move(parts), std::move(dims)};
             return out;
           }),
           py::kw_only(), py::arg("replace"), py::arg("manifest"), py::arg("threads"),
           py::arg("memory"), py::arg("parts"), py::arg("dims"));
}

void add_inspect(py::module_& m) {
  m.def(
      "inspect",
      [](const std::string& path, const Names& include, const Names& exclude, bool health,
         bool digest, const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          InspectOptions options;
          options.select = {include, exclude};
          options.health = health;
          options.digest = digest;
          options.progress = progress;
          return inspect(path, options);
        });
      },
      py::arg("path"), py::kw_only(), py::arg("include"), py::arg("exclude"), py::arg("health"),
      py::arg("digest"), py::arg("progress"));
}

void add_reshard(py::module_& m) {
  m.def(
      "reshard",
      [](const std::string& source, const std::string& target, const Names& include,
         const Names& exclude, bool dry_run, bool requantize, const WriteOptions& writing,
         const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          ReshardOptions options;
          options.select = {include, exclude};
          options.dry_run = dry_run;
          options.requantize = requantize;
          options.write = writing;
          options.write.progress = progress;
          return reshard(source, target, options);
        });
      },
      py::arg("source"), py::arg("target"), py::kw_only(), py::arg("include"), py::arg("exclude"),
      py::arg("dry_run"), py::arg("requantize"), py::arg("writing"), py::arg("progress"));
}

void add_verify(py::module_& m) {
  m.def(
      "verify",
      [](const std::string& path, const Names& include, const Names& exclude, bool finite,
         bool opaque, int threads, const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          VerifyOptions options;
          options.select = {include, exclude};
          options.finite = finite;
          options.opaque = opaque;
          options.threads = threads;
          options.progress = progress;
          return verify(path, options);
        });
      },
      py::arg("path"), py::kw_only(), py::arg("include"), py::arg("exclude"), py::arg("finite"),
      py::arg("opaque"), py::arg("threads"), py::arg("progress"));
}

/// What convert is told, field by field: lowbit/checkpoint/commands.py sets each by its name.
void add_convert_options(py::module_& m) {
  py::class_<Selection>(m, "Selection")
      .def(py::init<>())
      .def_readwrite("include", &Selection::include)
      .def_readwrite("exclude", &Selection::exclude);
  py::class_<Wanted>(m, "Wanted")
      .def(py::init<>())
      .def_readwrite("state_format", &Wanted::state_format)
      .def_readwrite("block", &Wanted::block)
      .def_readwrite("keep", &Wanted::keep)
      .def_readwrite("lossy", &Wanted::lossy)
      .def_readwrite("full_precision", &Wanted::full_precision);
  py::class_<ConvertOptions>(m, "ConvertOptions")
      .def(py::init<>())
      .def_readwrite("to", &ConvertOptions::to)
      .def_readwrite("from_", &ConvertOptions::from)
      .def_readwrite("container", &ConvertOptions::container)
      .def_readwrite("wanted", &ConvertOptions::wanted)
      .def_readwrite("select", &ConvertOptions::select)
      .def_readwrite("dry_run", &ConvertOptions::dry_run)
      .def_readwrite("weights", &ConvertOptions::weights)
      .def_readwrite("seed", &ConvertOptions::seed)
      .def_readwrite("model", &ConvertOptions::model)
      .def_readwrite("write", &ConvertOptions::write);
}

void add_convert(py::module_& m) {
  m.def(
      "convert",
      [](const std::string& source, const std::string& target, ConvertOptions options,
         const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          options.write.progress = progress;
          return convert(source, target, options);
        });
      },
      py::arg("source"), py::arg("target"), py::arg("options"), py::kw_only(), py::arg("progress"));
}

void add_diff(py::module_& m) {
  m.def(
      "diff",
      [](const std::string& a, const std::string& b, const Names& include, const Names& exclude,
         bool bytes, double tolerance, const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          DiffOptions options;
          options.select = {include, exclude};
          options.bytes = bytes;
          options.tolerance = tolerance;
          options.progress = progress;
          return diff(a, b, options);
        });
      },
      py::arg("a"), py::arg("b"), py::kw_only(), py::arg("include"), py::arg("exclude"),
      py::arg("bytes"), py::arg("tolerance"), py::arg("progress"));
}

void add_reader(py::module_& m) {
  py::class_<Reader>(m, "Reader")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("container", &Reader::container)
      .def("optimizers", &Reader::optimizers)
      .def("tensors", &Reader::tensors)
      .def("values", &Reader::values)
      .def("opaque", &Reader::opaque)
      .def("read", &Reader::read, py::arg("tensor"), py::arg("part"), py::arg("offset"),
           py::arg("shape"))
      .def("model", &Reader::model)
      .def("read_state", &Reader::read_state, py::arg("param"), py::arg("state"), py::arg("first"),
           py::arg("count"))
      .def("read_state_box", &Reader::read_state_box, py::arg("param"), py::arg("state"),
           py::arg("offset"), py::arg("shape"))
      .def("read_own", &Reader::read_own, py::arg("param"), py::arg("state"), py::arg("tensor"),
           py::arg("offset"), py::arg("shape"))
      .def("read_codes", &Reader::read_codes, py::arg("param"), py::arg("state"), py::arg("begin"),
           py::arg("end"), py::arg("scales"))
      .def("finish", &Reader::finish);
}

}  // namespace
}  // namespace lowbit::ckpt::python

PYBIND11_MODULE(_checkpoint, m) {
  using namespace lowbit::ckpt::python;
  m.doc() = "Checkpoints read, checked and rewritten in C++; use lowbit.checkpoint";
  for (const auto add : {add_writing, add_inspect, add_reshard, add_verify, add_convert_options,
                         add_convert, add_diff, add_reader})
    add(m);
}
