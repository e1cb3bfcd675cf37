// lowbit._checkpoint: what lowbit-ckpt does, for Python. lowbit/checkpoint.py and lowbit/reader.py
// are its face and say what everything means; here are no defaults.
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
    LB_TRY(made, work(progress));
    return made.dump(-1, ' ', false, Json::error_handler_t::replace);
  });
}

/// What all commands that write have in common.
struct Writing {
  bool replace, manifest;
  int threads;
  uint64_t memory;
  std::vector<int64_t> parts;
  std::vector<int> dims;
};

WriteOptions options_of(const Writing& w, const Progress& progress) {
  WriteOptions out;
  out.replace = w.replace;
  out.manifest = w.manifest;
  out.threads = w.threads;
  out.memory = w.memory;
  out.mesh.parts = w.parts;
  out.mesh.dims = w.dims;
  out.progress = progress;
  return out;
}

}  // namespace
}  // namespace lowbit::ckpt::python

PYBIND11_MODULE(_checkpoint, m) {
  using namespace lowbit::ckpt;
  using namespace lowbit::ckpt::python;
  m.doc() = "Checkpoints read, checked and rewritten in C++; use lowbit.checkpoint";

  py::class_<Writing>(m, "Writing")
      .def(py::init([](bool replace, bool manifest, int threads, uint64_t memory,
                       std::vector<int64_t> parts, std::vector<int> dims) {
             return Writing{replace, manifest, threads, memory, std::move(parts), std::move(dims)};
           }),
           py::kw_only(), py::arg("replace"), py::arg("manifest"), py::arg("threads"),
           py::arg("memory"), py::arg("parts"), py::arg("dims"));

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

  m.def(
      "reshard",
      [](const std::string& source, const std::string& target, const Names& include,
         const Names& exclude, bool dry_run, bool requantize, const Writing& writing,
         const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          ReshardOptions options;
          options.select = {include, exclude};
          options.dry_run = dry_run;
          options.requantize = requantize;
          options.write = options_of(writing, progress);
          return reshard(source, target, options);
        });
      },
      py::arg("source"), py::arg("target"), py::kw_only(), py::arg("include"), py::arg("exclude"),
      py::arg("dry_run"), py::arg("requantize"), py::arg("writing"), py::arg("progress"));

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

  m.def(
      "convert",
      [](const std::string& source, const std::string& target, const std::string& to,
         const std::string& from, const std::string& container, const std::string& state_format,
         int64_t block, bool keep, const Names& wide, const Names& include, const Names& exclude,
         bool dry_run, bool lossy, const std::string& weights, uint64_t seed,
         const std::string& model, const Writing& writing, const py::object& callback) {
        return report(callback, [&](const Progress& progress) {
          ConvertOptions options;
          options.to = to;
          options.from = from;
          options.container = container;
          options.wanted.state_format = state_format;
          options.wanted.block = block;
          options.wanted.keep = keep;
          options.wanted.wide = wide;
          options.select = {include, exclude};
          options.dry_run = dry_run;
          options.wanted.lossy = lossy;
          options.weights = weights;
          options.seed = seed;
          options.model = model;
          options.write = options_of(writing, progress);
          return convert(source, target, options);
        });
      },
      py::arg("source"), py::arg("target"), py::kw_only(), py::arg("to"), py::arg("from_"),
      py::arg("container"), py::arg("state_format"), py::arg("block"), py::arg("keep"),
      py::arg("wide"), py::arg("include"), py::arg("exclude"), py::arg("dry_run"), py::arg("lossy"),
      py::arg("weights"), py::arg("seed"), py::arg("model"), py::arg("writing"),
      py::arg("progress"));

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

  py::class_<Reader>(m, "Reader")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("container", &Reader::container)
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
      .def("read_codes", &Reader::read_codes, py::arg("param"), py::arg("state"), py::arg("begin"),
           py::arg("end"), py::arg("scales"))
      .def("finish", &Reader::finish);
}
