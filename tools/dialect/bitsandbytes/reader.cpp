// Reading bitsandbytes' state dicts, of all versions.
//
// A parameter has `step` and, since 0.49.2 in a dict of their own, state1 and state2 (float32, or
// bytes by the table qmap1, qmap2), and scales: absmax1, absmax2 of blocks of the flattened
// parameter (256 elements, 2048 before 0.44), or one number max1, max2. Only
// the number of states and the settings tell which optimizer it is.
#include "dialect/bitsandbytes/bitsandbytes.h"

#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The tensor or value of that name, wrapped or plain.
const Leaf* leaf_in(const Entry& entry, const std::string& name) {
  const Leaf* leaf = entry.find(std::string(kBnbWrapper) + "." + name);
  return leaf != nullptr ? leaf : entry.find(name);
}
const Leaf* bnb_tensor(const Entry& entry, const std::string& name) {
  const Leaf* leaf = leaf_in(entry, name);
  return leaf != nullptr && leaf->kind == Leaf::Kind::kTensor ? leaf : nullptr;
}

Result<int> recognize_bitsandbytes(const Document& /*document*/, const OptimizerTree& tree) {
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (name.starts_with(kBnbWrapper)) return 3;
    }
    if (bnb_tensor(entry, "state1") != nullptr)
      return bnb_tensor(entry, "qmap1") != nullptr || bnb_tensor(entry, "absmax1") != nullptr ? 3
                                                                                              : 2;
  }
  return 0;
}

/// The betas of a group, as many as there are.
std::vector<double> betas_of(const Group& group) {
  std::vector<double> out;
  const Value* betas = setting(group, "betas");
  for (size_t i = 0; betas != nullptr && i < betas->items.size(); ++i) {
    const Value& b = betas->items[i];
    out.push_back(b.is(Value::Kind::kFloat) ? b.real : static_cast<double>(b.integer));
  }
  return out;
}

/// What a group's settings and states say of the optimizer; "" where they say nothing.
std::string algorithm_of_group(const Group& group, bool two_states, bool doubled) {
  if (doubled) return "ademamix";
  if (two_states) return "adam";
  const std::vector<double> betas = betas_of(group);
  const auto eps = real_setting(group, "eps");
  if (betas.size() != 2 || !eps) return "";
  if (betas[0] == 0 && betas[1] == 0) return "adagrad";
  if (*eps != 0) return "rmsprop";
  if (betas[1] != 0) return "lion";
  return "sgd";
}

/// The settings as torch has them, beside those of the file.
void add_settings(Group& group, const std::string& algorithm) {
  const std::vector<double> betas = betas_of(group);
  if (algorithm == "adam") {
    set_in(group.settings, "decoupled_weight_decay", Value::boolean(true));
  } else if (algorithm == "sgd" && !betas.empty()) {
    // bitsandbytes accepts dampening and nesterov, and ignores them.
    set_in(group.settings, "momentum", Value::floating(betas[0]));
  } else if (algorithm == "rmsprop" && !betas.empty()) {
    set_in(group.settings, "alpha", Value::floating(betas[0]));
  }
}

struct BitsandbytesReader {
  const Entry& entry;
  Param& param;
  const std::string& algorithm;

  std::string what(const std::string& key) const { return shown(param) + ", " + key; }

  Result<const Leaf*> needed(const std::string& key, const char* dtype) const {
    const Leaf* leaf = bnb_tensor(entry, key);
    if (leaf == nullptr || leaf->source == nullptr) return bad(what(key) + ": is missing");
    if (dtype != nullptr && std::string_view(leaf->dtype->name) != dtype)
      return bad(what(key) + ": is " + leaf->dtype->name + ", not " + dtype +
                 ": the values were cast by the program that wrote or loaded them and cannot be "
                 "recovered");
    return leaf;
  }

  Status read() {
    RETURN_IF_ERROR(read_step(entry, param));
    if (leaf_in(entry, "state1") == nullptr && leaf_in(entry, "state2") == nullptr)
      return fine();  // it was never stepped
    const BnbSlots slots = bnb_slots(algorithm);
    RETURN_IF_ERROR(slot(1, slots.first));
    if (!slots.second.empty()) RETURN_IF_ERROR(slot(2, {slots.second}));
    // What is kept as it is where the target is bitsandbytes again.
    for (const char* key : {"unorm_vec", "gnorm_vec"}) {
      if (const Leaf* leaf = bnb_tensor(entry, key)) param.states[0].leaves.push_back(leaf);
    }
    return fine();
  }

  Status slot(int number, const std::vector<std::string>& names) {
    const std::string digit = std::to_string(number), key = "state" + digit;
    ASSIGN_OR_RETURN(state, needed(key, nullptr));
    RETURN_IF_ERROR(check_strides(*state, key));
    Shape shape = state->shape;
    if (names.size() > 1) {
      if (shape.empty() || shape[0] != static_cast<int64_t>(names.size()))
        return bad(what(key) + ": has the shape " + shape_text(shape) + ", where " +
                   std::to_string(names.size()) + " states in one belong");
      shape.erase(shape.begin());
    }
    if (param.known_shape && param.shape != shape)
      return bad(what(key) + ": has the shape " + shape_text(shape) + ", another state " +
                 shape_text(param.shape));
    param.learn(shape);
    const std::string_view dtype = state->dtype->name;
    if (dtype != "uint8" && dtype != "float32" && dtype != "bfloat16" && dtype != "float16")
      return bad(what(key) + ": is " + std::string(dtype) + ", neither bytes nor numbers");
    for (size_t i = 0; i < names.size(); ++i) {
      State s;
      s.name = names[i];
      s.shape = shape;
      s.is_signed = is_signed_state(s.name);
      s.leaves = {state};
      s.bytes = state->bytes() / names.size();
      if (dtype == "uint8") {
        RETURN_IF_ERROR(coded(s, number, state->source, i, names.size()));
      } else {
        s.stored_as = dtype;
        Leaf part = *state;
        part.source = part_of_source(state->source, i * volume(shape));
        s.values = floats_of(part);
      }
      param.states.push_back(std::move(s));
    }
    return fine();
  }

  /// bitsandbytes' kernels walk memory. State that was made for a parameter that did not lie
  /// row-major keeps its strides, and means one thing on a GPU and another on a CPU.
  Status check_strides(const Leaf& leaf, const std::string& key) const {
    if (leaf.stored == nullptr || !leaf.stored->alias) return fine();
    const Shape& stride = leaf.stored->alias->stride;
    if (is_row_major(leaf.shape, stride)) return fine();
    return bad(
        what(key) + ": lies with strides " + shape_text(stride) +
        " in memory, of which bitsandbytes on a GPU and on a CPU make different values; save "
        "it again after a step with contiguous parameters");
  }

  Status coded(State& s, int number, const std::shared_ptr<Source>& source, size_t part,
               size_t parts) {
    const std::string digit = std::to_string(number);
    ASSIGN_OR_RETURN(map_leaf, needed("qmap" + digit, "float32"));
    if (map_leaf->shape != Shape{256})
      return bad(what("qmap" + digit) + ": has the shape " + shape_text(map_leaf->shape) +
                 ", not [256]");
    s.leaves.push_back(map_leaf);
    std::vector<float> map(256);
    RETURN_IF_ERROR(map_leaf->source->read(0, 256, map.data()));
    const bool table_signed = number == 1;  // whatever the state is
    const std::string format = format_of_table(map, table_signed);
    const uint64_t n = volume(s.shape);
    const bool blockwise = bnb_tensor(entry, "absmax" + digit) != nullptr;
    ASSIGN_OR_RETURN(scales, needed((blockwise ? "absmax" : "max") + digit, "float32"));
    s.leaves.push_back(scales);
    BlockLayout layout{.count = n, .block = static_cast<int64_t>(std::max<uint64_t>(n, 1))};
    if (blockwise) {
      const uint64_t blocks = volume(scales->shape) / parts;
      ASSIGN_OR_RETURN(block, block_of(n, blocks, scales->shape, parts, "absmax" + digit));
      layout.block = block;
      if (part > 0) RETURN_IF_ERROR(check_rows(*scales, n, block));
    } else {
      if (volume(scales->shape) != 1) return bad(what("max" + digit) + ": is not a single number");
      if (const Leaf* next = bnb_tensor(entry, "new_max" + digit)) s.leaves.push_back(next);
    }
    for (size_t i = 1; i < s.leaves.size(); ++i) s.bytes += s.leaves[i]->bytes() / parts;
    const auto codes = part_of_source(source, part * n);
    const auto numbers = part_of_source(scales->source, part * layout.blocks());
    s.stored_as =
        std::string("bitsandbytes 8-bit ") + (table_signed ? "signed" : "unsigned") +
        (blockwise ? ", blocks of " + std::to_string(layout.block) : ", one scale for the tensor") +
        (format.empty() ? ", by its own table" : "");
    s.values =
        block_floats(std::make_shared<TableRule>(map), layout, codes, {float32_floats(numbers)});
    if (!format.empty() && blockwise && n > 0)
      s.codes = Codes{.format = format,
                      .bits = 8,
                      .rows = 1,
                      .cols = static_cast<int64_t>(n),
                      .block = layout.block,
                      .codes = codes,
                      .scales = numbers};
    return fine();
  }

  Result<int64_t> block_of(uint64_t n, uint64_t blocks, const Shape& shape, size_t parts,
                           const std::string& key) const {
    const bool form = parts == 1 ? shape.size() == 1
                                 : shape.size() == 2 && shape[0] == static_cast<int64_t>(parts);
    for (const int64_t block : {256, 2048, 4096, 1024, 512, 128, 64}) {
      const auto b = static_cast<uint64_t>(block);
      if (form && (n + b - 1) / b == blocks) return block;
    }
    return bad(what(key) + ": has the shape " + shape_text(shape) + ", which is not a number of " +
               "blocks of " + std::to_string(n) + " elements");
  }

  /// AdEMAMix's kernel on CUDA finds the scales of the second half one slot early where the last
  /// block is not full, so that two blocks share a slot and the last is never written.
  Status check_rows(const Leaf& scales, uint64_t n, int64_t block) const {
    if (n % static_cast<uint64_t>(block) == 0) return fine();
    std::vector<float> all(volume(scales.shape));
    RETURN_IF_ERROR(scales.source->read(0, all.size(), all.data()));
    const bool any = std::ranges::any_of(all, [](float x) { return x != 0; });
    if (any && all.back() == 0)
      return bad(what("absmax1") +
                 ": its last scale was never written, as by bitsandbytes' "
                 "AdEMAMix on a GPU where the number of elements (" +
                 std::to_string(n) + ") is not a multiple of " + std::to_string(block) +
                 ": two blocks share one scale there, and the values cannot be recovered");
    return fine();
  }
};

}  // namespace

BnbSlots bnb_slots(const std::string& algorithm) {
  if (algorithm == "adam") return {{"exp_avg"}, "exp_avg_sq"};
  if (algorithm == "ademamix") return {{"exp_avg", "exp_avg_slow"}, "exp_avg_sq"};
  if (algorithm == "lion") return {{"exp_avg"}};
  if (algorithm == "sgd") return {{"momentum_buffer"}};
  if (algorithm == "rmsprop") return {{"square_avg"}};
  if (algorithm == "adagrad") return {{"sum"}};
  return {};
}

Result<Model> read_bitsandbytes(std::shared_ptr<const Document> document,
                                const OptimizerTree& tree) {
  Model out = model_of(tree, "bitsandbytes", document);
  for (size_t g = 0; g < out.groups.size(); ++g) {
    bool any = false, two = false, doubled = false, norm = false, scaled = false;
    for (const size_t p : out.groups[g].params) {
      const Entry& entry = tree.params[p];
      const Leaf *first = bnb_tensor(entry, "state1"), *second = bnb_tensor(entry, "state2");
      any |= first != nullptr;
      two |= second != nullptr;
      for (const char* beside : {"qmap2", "absmax2", "max2"})
        scaled |= bnb_tensor(entry, beside) != nullptr;
      doubled |=
          first != nullptr && second != nullptr && first->shape.size() == second->shape.size() + 1;
      norm |= bnb_tensor(entry, "unorm_vec") != nullptr;
    }
    if (!any) continue;
    if (!two && (scaled || has_setting(out.groups[g], "t_alpha")))
      return bad("group " + std::to_string(g) +
                 " is of an optimizer with two states, and state2 is missing");
    const std::string algorithm = algorithm_of_group(out.groups[g], two, doubled);
    if (algorithm.empty())
      return bad("group " + std::to_string(g) +
                 ": its betas and eps do not tell which of bitsandbytes' optimizers it is of");
    if (!out.algorithm.empty() && out.algorithm != algorithm)
      return bad("its groups are of two optimizers, " + out.algorithm + " and " + algorithm);
    if (algorithm == "adam" && norm && out.algorithm.empty())
      out.warnings.push_back("bitsandbytes' LAMB has Adam's states; they are read as Adam's");
    if (algorithm == "sgd" && norm && out.algorithm.empty())
      out.warnings.push_back(
          "bitsandbytes' LARS has SGD's state, and limits its update (max_unorm); it is read as "
          "SGD's");
    if (algorithm == "lion" && out.algorithm.empty())
      out.warnings.push_back(
          "read as Lion's; bitsandbytes' SGD with a dampening, which it does not use, would look "
          "the same");
    out.algorithm = algorithm;
  }
  if (out.groups.empty()) {
    const auto has = [&](const char* key) {
      return std::ranges::any_of(tree.params,
                                 [&](const Entry& e) { return bnb_tensor(e, key) != nullptr; });
    };
    if (has("state1") && !has("state2"))
      return bad(
          "there are no parameter groups, without which the only state of bitsandbytes' "
          "Lion, SGD, RMSprop and Adagrad cannot be told apart");
    out.algorithm = "adam";
  }
  for (Group& group : out.groups) add_settings(group, out.algorithm);
  for (size_t i = 0; i < out.params.size(); ++i)
    RETURN_IF_ERROR((BitsandbytesReader{tree.params[i], out.params[i], out.algorithm}.read()));
  return out;
}

extern const Dialect kBitsandbytes = {
    "bitsandbytes",
    "bitsandbytes' 8-bit Adam, AdamW, AdEMAMix, Lion, SGD, RMSprop and Adagrad",
    recognize_bitsandbytes,
    read_bitsandbytes,
    write_bitsandbytes,
    {},
    {.always_decoupled = true, .coupled = "bitsandbytes decouples it in Adam as in AdamW"}};

}  // namespace lowbit::ckpt
