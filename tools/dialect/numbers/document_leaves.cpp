#include "dialect/numbers/document_leaves.h"

#include <string_view>

#include "dialect/numbers/floats.h"

namespace lowbit::ckpt {
namespace {

/// The bytes of a number.
template <class T>
std::shared_ptr<Source> held(const T& number) {
  return constant_source(std::string(reinterpret_cast<const char*>(&number), sizeof number),
                         sizeof number);
}

void add_value(Path path, const Value& value, std::vector<Leaf>& leaves) {
  if (!value.is_dict() || value.items.empty()) {
    leaves.push_back(value_leaf(std::move(path), value));
    return;
  }
  // As torch does, which enters dicts.
  for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
    const Value& key = value.items[i];
    add_value(below(path, key.is(Value::Kind::kText) ? Key(key.text)
                                                     : Key(Key::Kind::kNumber, key.integer)),
              value.items[i + 1], leaves);
  }
}

}  // namespace

bool is_float32(const Leaf& leaf) {
  return leaf.kind == Leaf::Kind::kTensor && leaf.source != nullptr &&
         std::string_view(leaf.dtype->name) == "float32";
}

bool is_float64(const State& state) {
  const Leaf* leaf = state.leaves.size() == 1 ? state.leaves[0] : nullptr;
  return leaf != nullptr && leaf->kind == Leaf::Kind::kTensor && leaf->source != nullptr &&
         !state.codes && !state.rescaled && std::string_view(leaf->dtype->name) == "float64";
}

Path state_path(const Model& model, const Param& param, const std::string& state) {
  if (model.flattened && param.index < 0)
    return below(model.root, "state." + param.name + "." + state);
  return below(model.root, "state",
               param.index >= 0 ? Key(Key::Kind::kNumber, param.index) : Key(param.name), state);
}

Leaf value_leaf(Path path, Value value) {
  Leaf leaf;
  leaf.kind = Leaf::Kind::kValue;
  leaf.path = std::move(path);
  leaf.value = std::move(value);
  return leaf;
}

Leaf tensor_leaf(Path path, const Dtype* dtype, Shape shape, std::shared_ptr<Source> source) {
  Leaf leaf;
  leaf.path = std::move(path);
  leaf.dtype = dtype;
  leaf.shape = std::move(shape);
  leaf.source = std::move(source);
  return leaf;
}

Leaf scalar_leaf(Path path, float value) {
  return tensor_leaf(std::move(path), find_dtype("float32"), {}, held(value));
}

Leaf scalar_leaf(Path path, int64_t value) {
  return tensor_leaf(std::move(path), find_dtype("int64"), {}, held(value));
}

Leaf float32_leaf(Path path, const State& state, Shape shape) {
  Leaf leaf = tensor_leaf(std::move(path), find_dtype("float32"), std::move(shape), nullptr);
  const Leaf* from = state.leaves.size() == 1 ? state.leaves[0] : nullptr;
  if (from != nullptr && !state.rescaled && from->source != nullptr && from->dtype == leaf.dtype &&
      from->shape == leaf.shape) {
    leaf.source = from->source;
    leaf.stored = from->stored;
  } else {
    leaf.source = float32_source(state.values);
  }
  return leaf;
}

Value size_value(const Shape& shape) {
  Value size{.kind = Value::Kind::kSize};
  for (const int64_t n : shape) size.items.push_back(Value::number(n));
  return size;
}

Status add_groups(const Model& model, const std::function<Result<Settings>(const Group&)>& settings,
                  std::vector<Leaf>& leaves) {
  for (size_t g = 0; g < model.groups.size(); ++g) {
    ASSIGN_OR_RETURN(made, settings(model.groups[g]));
    if (model.flattened) {
      for (const size_t p : model.groups[g].params) {
        for (const auto& [name, value] : made) {
          add_value(below(model.root, "param_groups." + model.params[p].name + "." + name), value,
                    leaves);
        }
      }
      continue;
    }
    const Path group = below(model.root, "param_groups", place(g));
    Value params = Value::list({});
    for (const size_t p : model.groups[g].params) {
      const Param& param = model.params[p];
      params.items.push_back(param.index >= 0 ? Value::number(param.index)
                                              : Value::words(param.name));
    }
    for (const auto& [name, value] : made) add_value(below(group, name), value, leaves);
    leaves.push_back(value_leaf(below(group, "params"), std::move(params)));
  }
  // Optimizers look for "state" where no parameter has any, too.
  const Path state = below(model.root, "state");
  const auto there = [&](const Leaf& leaf) { return is_below(leaf.path, state); };
  if (!model.flattened && !model.groups.empty() && std::ranges::none_of(leaves, there) &&
      std::ranges::none_of(model.rest, there))
    leaves.push_back(value_leaf(state, Value{.kind = Value::Kind::kDict}));
  return fine();
}

Document begun(const Model& model) {
  Document out;
  if (model.document != nullptr) out.manifest = model.document->manifest;
  return out;
}

}  // namespace lowbit::ckpt
