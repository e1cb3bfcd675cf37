// Reading the states of torchao's Adam8bit, Adam4bit, AdamFp8 and their AdamW.
//
// exp_avg, exp_avg_sq and max_exp_avg_sq are tensor subclasses with inner tensors `codes`, `scale`
// and (but for fp8) `qmap`, in blocks of the flattened tensor; parameters that are small, or no
// multiple of a block, have plain tensors. The length of a block follows from the sizes. A
// directory of ranks holds one subclass for each rank's part, with blocks of its own, and a rank
// whose part is not a multiple of a block holds a plain one.
#include "dialect/torchao/torchao.h"

#include <algorithm>
#include <charconv>

#include "dialect/common/other_libraries.h"
#include "dialect/torchao/state.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

/// The class of a leaf, wherever its container keeps it; "" for a plain tensor.
Result<std::string> class_of(const Document& document, const Leaf& leaf) {
  if (leaf.kind == Leaf::Kind::kSubclass) return leaf.cls;
  if (leaf.kind != Leaf::Kind::kTensor || leaf.source != nullptr || leaf.stored == nullptr ||
      leaf.stored->chunks.empty())
    return std::string();
  for (const Chunk& chunk : leaf.stored->chunks) {
    ASSIGN_OR_RETURN(stored, document.manifest->container->stored(*leaf.stored, chunk));
    if (!stored.cls.empty()) return stored.cls;
  }
  return std::string();
}

Result<int> recognize_torchao(const Document& document, const OptimizerTree& tree) {
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      ASSIGN_OR_RETURN(cls, class_of(document, *leaf));
      if (torchao_kind(cls) != nullptr) return 3;
    }
  }
  return 0;
}

/// A state of a parameter, whose shape it tells.
Status add_state(const Document& document, const std::string& name, const Leaf& leaf,
                 Param& param) {
  if (param.known_shape && param.shape != leaf.shape)
    return bad(printable(leaf.name()) + ": has the shape " + shape_text(leaf.shape) +
               ", another state of its parameter " + shape_text(param.shape));
  param.learn(leaf.shape);
  ASSIGN_OR_RETURN(read, torchao_state(document, leaf));
  read.state.name = name;
  param.states.push_back(std::move(read.state));
  return fine();
}

/// torchao keeps the learning rate in float32. The shortest decimal number of that float32 is what
/// the user wrote, as far as anyone can tell.
Value as_written(const Value& value) {
  const auto narrow = static_cast<float>(value.real);
  if (!value.is(Value::Kind::kFloat) || static_cast<double>(narrow) != value.real) return value;
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, narrow);
  double wide = value.real;
  std::from_chars(text, end.ptr, wide);
  return Value::floating(wide);
}

}  // namespace

Result<Model> read_torchao(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  Model out = model_of(tree, "torchao", document);
  for (size_t i = 0; i < out.params.size(); ++i) {
    Param& param = out.params[i];
    const Entry& entry = tree.params[i];
    RETURN_IF_ERROR(read_step(entry, param));
    for (const char* name : kStates) {
      if (const Leaf* leaf = entry.find(name))
        RETURN_IF_ERROR(add_state(*document, name, *leaf, param));
    }
  }
  for (Group& group : out.groups) {
    for (auto& [name, value] : group.settings) {
      if (name == "lr" || name == "initial_lr") value = as_written(value);
    }
  }
  out.algorithm = "adam";
  return out;
}

constexpr KeptSetting kKeptByTorchao[] = {{"adam", "amsgrad"}};

extern const Dialect kTorchao = {"torchao",
                                 "torchao's AdamW8bit, AdamW4bit, AdamWFp8 and their Adam",
                                 recognize_torchao,
                                 read_torchao,
                                 write_torchao,
                                 kKeptByTorchao,
                                 {.coupled = "continue with torchao's Adam, not its AdamW"}};

}  // namespace lowbit::ckpt
