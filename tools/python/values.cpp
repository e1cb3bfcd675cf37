#include "python/values.h"

#include "dialect/common/formats.h"
#include "io/text.h"

namespace py = pybind11;

namespace lowbit::ckpt::python {
namespace {

/// None where the state is not kept in codes of lowbit's formats.
py::object codes_of(const State& state) {
  if (!state.codes || find_format(state.codes->format) == nullptr) return py::none();
  const Codes& c = *state.codes;
  py::dict out;
  out["format"] = text(c.format);
  out["bits"] = c.bits;
  out["rows"] = c.rows;
  out["cols"] = c.cols;
  out["block"] = c.block;
  return out;
}

py::dict state_of(const State& state) {
  py::dict out;
  out["name"] = text(state.name);
  out["shape"] = to_python(state.shape);
  out["signed"] = state.is_signed;
  out["stored_as"] = text(state.stored_as);
  out["bytes"] = state.bytes;
  out["codes"] = codes_of(state);
  py::list own;
  for (const auto& [key, leaf] : own_tensors(state)) {
    py::dict tensor;
    tensor["key"] = text(key);
    tensor["dtype"] = leaf->dtype->name;
    tensor["shape"] = to_python(leaf->shape);
    own.append(tensor);
  }
  out["own"] = own;
  return out;
}

/// Named values: the numbers of a parameter, the settings of a group.
py::dict named(const Settings& values) {
  py::dict out;
  for (const auto& [name, value] : values) out[text(name)] = to_python(value);
  return out;
}

py::dict param_of(const Param& param) {
  py::list states;
  for (const State& state : param.states) states.append(state_of(state));
  py::dict out;
  out["name"] = text(param.name);
  out["index"] = param.index;
  out["shape"] = param.known_shape ? py::object(to_python(param.shape)) : py::object(py::none());
  out["states"] = states;
  out["numbers"] = named(param.numbers);
  return out;
}

py::dict group_of(const Group& group) {
  py::list params;
  for (const size_t i : group.params) params.append(i);
  py::list tensors;
  for (const auto& [path, leaf] : group.tensors)
    tensors.append(py::make_tuple(to_python(path), text(leaf->name())));
  py::dict out;
  out["settings"] = named(group.settings);
  out["params"] = py::tuple(params);
  out["tensors"] = py::tuple(tensors);
  return out;
}

}  // namespace

OwnTensors own_tensors(const State& state) {
  OwnTensors out;
  for (const auto& [key, leaf] : state.own) {
    if (leaf.source != nullptr) out.emplace_back(key, &leaf);
  }
  if (out.empty() && state.raw) out.emplace_back(state.name, &*state.raw);
  return out;
}

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

py::dict to_python(const Model& model) {
  py::list warnings, params, groups;
  for (const std::string& line : model.warnings) warnings.append(text(printable(line)));
  for (const Param& param : model.params) params.append(param_of(param));
  for (const Group& group : model.groups) groups.append(group_of(group));
  py::dict out;
  out["dialect"] = text(model.dialect);
  out["algorithm"] = text(model.algorithm);
  out["root"] = to_python(model.root);
  out["flattened"] = model.flattened;
  out["warnings"] = warnings;
  out["params"] = params;
  out["groups"] = groups;
  return out;
}

}  // namespace lowbit::ckpt::python
