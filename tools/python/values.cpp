#include "python/values.h"

#include "dialect/model/formats.h"
#include "dialect/tree/algorithm.h"
#include "io/text.h"

namespace lowbit::ckpt::python {
namespace {

/// None where the state is not kept in codes of lowbit's formats.
Object codes_of(const State& state) {
  if (!state.codes || find_format(state.codes->format) == nullptr) return none();
  const Codes& c = *state.codes;
  Dict out;
  out.set("format", text(c.format));
  out.set("bits", integer(c.bits));
  out.set("rows", integer(c.rows));
  out.set("cols", integer(c.cols));
  out.set("block", integer(c.block));
  return std::move(out).done();
}

Object state_of(const State& state) {
  List own;
  for (const auto& [key, leaf] : own_tensors(state)) {
    Dict tensor;
    tensor.set("key", text(key));
    tensor.set("dtype", text(leaf->dtype->name));
    tensor.set("shape", to_python(leaf->shape));
    own.append(std::move(tensor).done());
  }
  Dict out;
  out.set("name", text(state.name));
  out.set("shape", to_python(state.shape));
  out.set("signed", boolean(state.is_signed));
  out.set("stored_as", text(state.stored_as));
  out.set("bytes", count(state.bytes));
  out.set("codes", codes_of(state));
  out.set("own", std::move(own).done());
  return std::move(out).done();
}

/// Named values: the numbers of a parameter, the settings of a group.
Object named(const Settings& values) {
  Dict out;
  for (const auto& [name, value] : values) out.set(text(name), to_python(value));
  return std::move(out).done();
}

Object param_of(const Param& param) {
  List states;
  for (const State& state : param.states) states.append(state_of(state));
  Dict out;
  out.set("name", text(param.name));
  out.set("index", integer(param.index));
  out.set("shape", param.known_shape ? to_python(param.shape) : none());
  out.set("states", std::move(states).done());
  out.set("numbers", named(param.numbers));
  return std::move(out).done();
}

Object group_of(const Group& group) {
  std::vector<Object> params, tensors;
  for (const size_t i : group.params) params.push_back(count(i));
  for (const auto& [path, leaf] : group.tensors) {
    std::vector<Object> pair;
    pair.push_back(to_python(path));
    pair.push_back(text(leaf->name()));
    tensors.push_back(tuple(std::move(pair)));
  }
  Dict out;
  out.set("settings", named(group.settings));
  out.set("params", tuple(std::move(params)));
  out.set("tensors", tuple(std::move(tensors)));
  return std::move(out).done();
}

/// A dict's keys: what has no hash is named by its repr.
Object key_of(const Value& key) {
  Object made = to_python(key);
  return key.is(Value::Kind::kList) || key.is_dict() ? Object(PyObject_Repr(made.get()))
                                                     : std::move(made);
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

Object to_python(const Path& path) {
  std::vector<Object> out;
  for (const Key& key : path) out.push_back(key.is_name() ? text(key.name) : integer(key.number));
  return tuple(std::move(out));
}

Object to_python(const Shape& shape) {
  std::vector<Object> out;
  for (const int64_t size : shape) out.push_back(integer(size));
  return tuple(std::move(out));
}

Object to_python(const Value& v) {
  switch (v.kind) {
    case Value::Kind::kNone:
      return none();
    case Value::Kind::kBool:
      return boolean(v.integer != 0);
    case Value::Kind::kInt:
      return integer(v.integer);
    case Value::Kind::kFloat:
      return real(v.real);
    case Value::Kind::kText:
    case Value::Kind::kGlobal:
    case Value::Kind::kDevice:
      return text(v.text);
    case Value::Kind::kOpaque:
      return text("<" + v.text + ": opaque, not read>");
    case Value::Kind::kLong:
      return Object(PyLong_FromString(hexadecimal(v).c_str(), nullptr, 16));
    case Value::Kind::kBytearray:
    case Value::Kind::kBytes:
      return bytes(v.text);
    case Value::Kind::kDict:
    case Value::Kind::kOrdered: {
      Dict out;
      for (size_t i = 0; i + 1 < v.items.size(); i += 2)
        out.set(key_of(v.items[i]), to_python(v.items[i + 1]));
      return std::move(out).done();
    }
    case Value::Kind::kList: {
      List out;
      for (const Value& item : v.items) out.append(to_python(item));
      return std::move(out).done();
    }
    default: {
      std::vector<Object> out;
      for (const Value& item : v.items) out.push_back(to_python(item));
      return tuple(std::move(out));
    }
  }
}

Object to_python(const Model& model) {
  List warnings, params, groups;
  for (const std::string& line : model.warnings) warnings.append(text(printable(line)));
  for (const Param& param : model.params) params.append(param_of(param));
  for (const Group& group : model.groups) groups.append(group_of(group));
  Dict out;
  out.set("dialect", text(model.dialect));
  out.set("algorithm", text(model.algorithm));
  out.set("root", to_python(model.root));
  out.set("flattened", boolean(model.flattened));
  out.set("warnings", std::move(warnings).done());
  const std::string& refusal =
      model.refusal.empty() ? refusal_of_rule(model, "lowbit") : model.refusal;
  out.set("refusal", text(printable(refusal)));
  out.set("params", std::move(params).done());
  out.set("groups", std::move(groups).done());
  return std::move(out).done();
}

}  // namespace lowbit::ckpt::python
