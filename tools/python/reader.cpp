#include "python/reader.h"

#include "container/open.h"
#include "dialect/coding.h"
#include "dialect/dialect.h"
#include "io/text.h"
#include "python/work.h"

namespace py = pybind11;

namespace lowbit::ckpt::python {
namespace {

py::object text(const std::string& s) {
  py::object out = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "surrogatepass"));
  if (!out) throw py::error_already_set();
  return out;
}

py::tuple to_python(const Path& path) {
  py::tuple out(path.size());
  for (size_t i = 0; i < path.size(); ++i)
    out[i] = path[i].is_name() ? text(path[i].name) : py::object(py::int_(path[i].number));
  return out;
}

py::tuple to_python(const Shape& shape) {
  py::tuple out(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) out[i] = py::int_(shape[i]);
  return out;
}

py::bytearray buffer_of(uint64_t bytes) {
  auto out = py::reinterpret_steal<py::bytearray>(
      PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!out) throw py::error_already_set();
  return out;
}

/// Raises ValueError where a box is not inside a shape.
void check_box(const Shape& whole, const Shape& offset, const Shape& shape) {
  bool inside = offset.size() == whole.size() && shape.size() == whole.size();
  for (size_t d = 0; inside && d < whole.size(); ++d)
    inside = offset[d] >= 0 && shape[d] >= 0 && offset[d] <= whole[d] &&
             shape[d] <= whole[d] - offset[d];
  if (!inside)
    throw py::value_error("a box of " + shape_text(shape) + " at " + shape_text(offset) +
                          " is not inside " + shape_text(whole));
}

/// A box of row-major elements, by as long runs as there are: `read(first, count, out)`, `out` in
/// elements.
template <class Read>
Status read_runs(const Shape& whole, const Shape& offset, const Shape& shape, const Read& read) {
  if (volume(shape) == 0) return fine();
  const Shape stride = row_major(whole);
  size_t outer = whole.size();  // dimensions before the run
  uint64_t run = 1;
  while (outer > 0) {
    --outer;
    run *= static_cast<uint64_t>(shape[outer]);
    if (shape[outer] != whole[outer]) break;
  }
  Shape at(outer, 0);
  for (uint64_t to = 0;; to += run) {
    int64_t first = 0;
    for (size_t d = 0; d < whole.size(); ++d)
      first += (offset[d] + (d < outer ? at[d] : 0)) * stride[d];
    LB_CHECK(read(static_cast<uint64_t>(first), run, to));
    size_t d = outer;
    while (d > 0 && ++at[d - 1] == shape[d - 1]) at[--d] = 0;
    if (d == 0) return fine();
  }
}

}  // namespace

py::object to_python(const Value& v) {
  switch (v.kind) {
    case Value::Kind::kNone:
      return py::none();
    case Value::Kind::kBool:
      return py::bool_(v.integer != 0);
    case Value::Kind::kInt:
      return py::int_(v.integer);
    case Value::Kind::kFloat:
      return py::float_(v.real);
    case Value::Kind::kText:
    case Value::Kind::kGlobal:
    case Value::Kind::kDevice:
      return text(v.text);
    case Value::Kind::kBytes:
      return py::bytes(v.text);
    case Value::Kind::kDict:
    case Value::Kind::kOrdered: {
      py::dict out;
      for (size_t i = 0; i + 1 < v.items.size(); i += 2) {
        const bool key = !v.items[i].is(Value::Kind::kList) && !v.items[i].is_dict();
        out[key ? to_python(v.items[i]) : py::repr(to_python(v.items[i]))] =
            to_python(v.items[i + 1]);
      }
      return out;
    }
    default: {
      py::list out;
      for (const Value& item : v.items) out.append(to_python(item));
      return v.is(Value::Kind::kList) ? py::object(out) : py::object(py::tuple(out));
    }
  }
}

Reader::Reader(const std::string& path) {
  without_gil([&]() -> Status {
    LB_TRY(document, open_checkpoint(path));
    document_ = std::make_shared<const Document>(std::move(document));
    return fine();
  });
  reader_ = std::make_unique<TensorReader>(*document_->manifest);
  for (const Leaf& leaf : document_->leaves) {
    if (leaf.kind == Leaf::Kind::kTensor || leaf.kind == Leaf::Kind::kSubclass)
      tensors_.push_back(&leaf);
  }
}

std::string Reader::container() const { return container_name(document_->manifest->kind); }

py::list Reader::tensors() const {
  py::list out;
  for (const Leaf* leaf : tensors_) {
    py::list parts;
    for (const Leaf& part : leaf->parts)
      parts.append(py::make_tuple(text(part.name()), part.dtype->name, to_python(part.shape)));
    out.append(py::make_tuple(text(leaf->name()), to_python(leaf->path), leaf->dtype->name,
                              to_python(leaf->shape), leaf->bytes(), text(leaf->cls), parts));
  }
  return out;
}

py::list Reader::values() const {
  py::list out;
  for (const Leaf& leaf : document_->leaves) {
    if (leaf.kind == Leaf::Kind::kValue)
      out.append(
          py::make_tuple(text(leaf.name()), to_python(leaf.path), python::to_python(leaf.value)));
  }
  return out;
}

py::list Reader::opaque() const {
  py::list out;
  for (const Leaf& leaf : document_->leaves) {
    if (leaf.kind == Leaf::Kind::kOpaque) out.append(text(leaf.name()));
  }
  return out;
}

py::bytearray Reader::read(size_t tensor, int part, const Shape& offset, const Shape& shape) {
  if (tensor >= tensors_.size()) throw py::index_error("there is no tensor of that number");
  const Leaf* leaf = tensors_[tensor];
  const std::string name = printable(leaf->name());
  if (part >= 0) {
    if (static_cast<size_t>(part) >= leaf->parts.size())
      throw py::index_error(name + " has no part of that number");
    leaf = &leaf->parts[static_cast<size_t>(part)];
  }
  if (leaf->source == nullptr)
    raise(bad(name + ": is a tensor subclass, whose values are read as those of a parameter")
              .at(name));
  check_box(leaf->shape, offset, shape);
  const auto width = static_cast<uint64_t>(leaf->dtype->bytes);
  py::bytearray out = buffer_of(volume(shape) * width);
  char* to = PyByteArray_AS_STRING(out.ptr());
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    if (leaf->stored != nullptr && leaf->stored->chunks.size() > 0)
      return volume(shape) == 0 ? fine() : reader_->read(*leaf->stored, Box{offset, shape}, to);
    const Status done =
        read_runs(leaf->shape, offset, shape, [&](uint64_t first, uint64_t count, uint64_t at) {
          return leaf->source->read(first, count, to + at * width);
        });
    return done.ok() ? fine() : Status(done.error().at(name));
  });
  return out;
}

py::dict Reader::model() {
  if (model_ == nullptr) {
    without_gil([&]() -> Status {
      const std::lock_guard guard(lock_);
      LB_TRY(dialect, recognize(*document_));
      LB_TRY(made, dialect->read(document_));
      model_ = std::make_unique<Model>(std::move(made));
      return fine();
    });
  }
  py::list params, groups;
  for (const Param& param : model_->params) {
    py::list states;
    for (const State& s : param.states) {
      py::object codes = py::none();
      const FormatInfo* format = s.codes ? find_format(s.codes->format) : nullptr;
      if (format != nullptr) {
        const Codes& c = *s.codes;
        py::dict said;
        said["format"] = text(c.format);
        said["bits"] = c.bits;
        said["rows"] = c.rows;
        said["cols"] = c.cols;
        said["block"] = c.block;
        codes = std::move(said);
      }
      py::dict out;
      out["name"] = text(s.name);
      out["shape"] = to_python(s.shape);
      out["signed"] = s.is_signed;
      out["stored_as"] = text(s.stored_as);
      out["bytes"] = s.bytes;
      out["codes"] = codes;
      states.append(out);
    }
    py::dict numbers, out;
    for (const auto& [name, value] : param.numbers) numbers[text(name)] = to_python(value);
    out["name"] = text(param.name);
    out["index"] = param.index;
    out["shape"] = param.known_shape ? py::object(to_python(param.shape)) : py::object(py::none());
    out["states"] = states;
    out["numbers"] = numbers;
    params.append(out);
  }
  for (const Group& group : model_->groups) {
    py::dict settings, out;
    for (const auto& [name, value] : group.settings) settings[text(name)] = to_python(value);
    out["settings"] = settings;
    out["params"] = py::list();
    for (const size_t i : group.params) out["params"].cast<py::list>().append(i);
    groups.append(out);
  }
  py::dict out;
  out["dialect"] = text(model_->dialect);
  out["algorithm"] = text(model_->algorithm);
  out["root"] = to_python(model_->root);
  out["flattened"] = model_->flattened;
  py::list warnings;
  for (const std::string& line : model_->warnings) warnings.append(text(printable(line)));
  out["warnings"] = warnings;
  out["params"] = params;
  out["groups"] = groups;
  return out;
}

const State& Reader::state(size_t param, size_t state) const {
  if (model_ == nullptr || param >= model_->params.size() ||
      state >= model_->params[param].states.size())
    throw py::index_error("there is no such state");
  return model_->params[param].states[state];
}

py::bytearray Reader::read_state(size_t param, size_t number, uint64_t first, uint64_t count) {
  const State& s = state(param, number);
  const auto all = static_cast<int64_t>(volume(s.shape));
  check_box({all}, {static_cast<int64_t>(first)}, {static_cast<int64_t>(count)});
  return read_floats(param, number, count, [&](float* to) {
    return count == 0 ? fine() : s.values->read(first, count, to);
  });
}

py::bytearray Reader::read_state_box(size_t param, size_t number, const Shape& offset,
                                     const Shape& shape) {
  const State& s = state(param, number);
  check_box(s.shape, offset, shape);
  return read_floats(param, number, volume(shape), [&](float* to) {
    return read_runs(s.shape, offset, shape, [&](uint64_t first, uint64_t count, uint64_t at) {
      return s.values->read(first, count, to + at);
    });
  });
}

py::bytearray Reader::read_floats(size_t param, size_t number, uint64_t count,
                                  const std::function<Status(float*)>& read) {
  py::bytearray out = buffer_of(count * sizeof(float));
  auto* to = reinterpret_cast<float*>(PyByteArray_AS_STRING(out.ptr()));
  const std::string name =
      printable(model_->params[param].name + "." + model_->params[param].states[number].name);
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    const Status done = read(to);
    return done.ok() ? fine() : Status(done.error().at(name));
  });
  return out;
}

py::bytearray Reader::read_codes(size_t param, size_t number, int64_t begin, int64_t end,
                                 bool scales) {
  const State& s = state(param, number);
  const FormatInfo* format = s.codes ? find_format(s.codes->format) : nullptr;
  if (format == nullptr) throw py::value_error("this state has no codes of lowbit's formats");
  const Codes& c = *s.codes;
  check_box({c.rows}, {begin}, {end - begin});
  if (scales && (c.scales == nullptr || c.block <= 0))
    throw py::value_error("this state has no scales");
  // Elements of a row, and their bytes.
  const auto cols = static_cast<uint64_t>(c.cols), bits = static_cast<uint64_t>(c.bits);
  const auto block = static_cast<uint64_t>(c.block);
  const uint64_t row =
      scales ? (cols + block - 1) / block * uint64_t(format->scale_numbers) : (cols * bits + 7) / 8;
  const uint64_t width = scales ? uint64_t(format->scale_dtype->bytes) : 1;
  const auto first = static_cast<uint64_t>(begin), rows = static_cast<uint64_t>(end - begin);
  py::bytearray out = buffer_of(rows * row * width);
  char* to = PyByteArray_AS_STRING(out.ptr());
  const std::string name = printable(model_->params[param].name + "." + s.name);
  without_gil([&]() -> Status {
    const std::lock_guard guard(lock_);
    if (rows * row == 0) return fine();
    const Status done = (scales ? c.scales : c.codes)->read(first * row, rows * row, to);
    return done.ok() ? fine() : Status(done.error().at(name));
  });
  return out;
}

void Reader::finish() {
  without_gil([&] {
    const std::lock_guard guard(lock_);
    return document_->finish();
  });
}

}  // namespace lowbit::ckpt::python
