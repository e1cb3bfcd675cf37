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
  Dict out;
  out.set("name", text(state.name));
  out.set("shape", to_python(state.shape));
  out.set("signed", boolean(state.is_signed));
  out.set("stored_as", text(state.stored_as));
  out.set("bytes", count(state.bytes));
  out.set("codes", codes_of(state));
  out.set("own", list_by(own_tensors(state), [](const auto& own) {
            Dict tensor;
            tensor.set("key", text(own.first));
            tensor.set("dtype", text(own.second->dtype->name));
            tensor.set("shape", to_python(own.second->shape));
            return std::move(tensor).done();
          }));
  return std::move(out).done();
}

/// Named values: the numbers of a parameter, the settings of a group.
Object named(const Settings& values) {
  Dict out;
  for (const auto& [name, value] : values) out.set(text(name), to_python(value));
  return std::move(out).done();
}

Object param_of(const Param& param) {
  Dict out;
  out.set("name", text(param.name));
  out.set("index", integer(param.index));
  out.set("shape", param.known_shape ? to_python(param.shape) : none());
  out.set("states", list_by(param.states, state_of));
  out.set("numbers", named(param.numbers));
  return std::move(out).done();
}

Object group_of(const Group& group) {
  Dict out;
  out.set("settings", named(group.settings));
  out.set("params", tuple_by(group.params, count));
  out.set("tensors", tuple_by(group.tensors, [](const auto& tensor) {
            return tuple_of(to_python(tensor.first), text(tensor.second->name()));
          }));
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
  return tuple_by(
      path, [](const Key& key) { return key.is_name() ? text(key.name) : integer(key.number); });
}

Object to_python(const Shape& shape) { return tuple_by(shape, integer); }

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
    case Value::Kind::kList:
      return list_by(v.items, [](const Value& item) { return to_python(item); });
    default:
      return tuple_by(v.items, [](const Value& item) { return to_python(item); });
  }
}

Object to_python(const Model& model) {
  Dict out;
  out.set("dialect", text(model.dialect));
  out.set("algorithm", text(model.algorithm));
  out.set("root", to_python(model.root));
  out.set("flattened", boolean(model.flattened));
  out.set("warnings",
          list_by(model.warnings, [](const std::string& line) { return text(printable(line)); }));
  const std::string& refusal =
      model.refusal.empty() ? refusal_of_rule(model, "lowbit") : model.refusal;
  out.set("refusal", text(printable(refusal)));
  out.set("params", list_by(model.params, param_of));
  out.set("groups", list_by(model.groups, group_of));
  return std::move(out).done();
}

}  // namespace lowbit::ckpt::python
