#include "dialect/common/rounding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "catalog/catalog.h"
#include "core/random.h"
#include "cpu/step.h"
#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/master.h"
#include "dialect/tree/optimizer_root.h"
#include "dialect/tree/optimizer_tree.h"
#include "dialect/tree/weights.h"
#include "io/scratch_buffer.h"
#include "io/text.h"
#include "policy/names.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kRoundingPiece = 1u << 14;

/// The rounding that gives a weight and its compensation.
struct Rounding {
  int format;
  RandomKey key;
  std::shared_ptr<Floats> values;
};

/// Rounded weights, or the compensation that their format keeps beside them.
class Rounded : public Source {
 public:
  Rounded(Rounding how, bool compensation, StateReport* report)
      : how_(std::move(how)),
        info_(param_info(how_.format)),
        is_compensation_(compensation),
        errors_(report),
        width_(static_cast<uint64_t>(compensation ? info_.compensation_bytes : info_.bytes)),
        // The two bytes of split16 are two elements.
        parts_(compensation && std::string_view(info_.compensation_dtype) == "uint8" ? 2 : 1) {}

  Status do_read(uint64_t first, uint64_t count, void* out) override {
    auto* to = static_cast<char*>(out);
    const ScratchBuffer memory(x_, back_, random_, stored_, compensation_);
    while (count > 0) {
      const uint64_t begin = first / parts_;
      const uint64_t end = std::min((first + count + parts_ - 1) / parts_, begin + kRoundingPiece);
      RETURN_IF_ERROR(round(begin, end - begin));
      const uint64_t skip = first % parts_, n = std::min(count, (end - begin) * parts_ - skip);
      const uint64_t each = width_ / parts_;
      std::memcpy(to, (is_compensation_ ? compensation_ : stored_).data() + skip * each, n * each);
      first += n, count -= n, to += n * each;
    }
    return fine();
  }

 private:
  Status round(uint64_t first, uint64_t n) {
    x_.resize(n), random_.resize(n), stored_.resize(n * static_cast<uint64_t>(info_.bytes));
    compensation_.resize(n * static_cast<uint64_t>(std::max(info_.compensation_bytes, 1)));
    RETURN_IF_ERROR(how_.values->read(first, n, x_.data()));
    if (info_.random) {
      Random8 bits{};
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t element = first + i;
        if (i == 0 || element % 8 == 0) bits = random8(how_.key, element / 8);
        random_[i] = static_cast<uint16_t>(bits.bits16(static_cast<int>(element % 8)));
      }
    }
    const auto& kernels = cpu::kernels();
    void* compensation = info_.compensation_bytes > 0 ? compensation_.data() : nullptr;
    kernels.store_param[how_.format](x_.data(), stored_.data(), compensation, static_cast<int>(n),
                                     info_.random ? random_.data() : nullptr);
    if (errors_.wanted()) {
      back_.resize(n);
      kernels.load_param[how_.format](stored_.data(), compensation, back_.data(),
                                      static_cast<int>(n));
      errors_.add(x_.data(), back_.data(), n);
    }
    return fine();
  }

  const Rounding how_;
  const ParamInfo info_;
  const bool is_compensation_;
  ErrorSum errors_;
  const uint64_t width_, parts_;
  std::vector<float> x_, back_;
  std::vector<uint16_t> random_;
  std::vector<char> stored_, compensation_;
};

Status check_format(const std::string& format) {
  const std::vector<std::string> all = weight_formats();
  if (std::ranges::find(all, format) != all.end()) return fine();
  return usage(fmt::format("weights cannot be stored as {}; the formats are {}", printable(format),
                           fmt::join(all, ", ")));
}

/// An error if a weight has compensation or a master weight already.
Status check_untouched(const OptimizerTree& tree) {
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (name.starts_with("param_"))
        return bad(shown(entry) + ": already keeps " + printable(name) + " beside its weight");
      if (is_master(name))
        return bad(shown(entry) + ": still keeps a float32 master weight in " + printable(name));
    }
  }
  return fine();
}

/// A weight to round: its parameter, null where parameters have no names, and the name that draws
/// the random bits.
struct ChosenWeight {
  const Entry* entry;
  std::string name;
};
using ChosenWeights = std::map<const Leaf*, ChosenWeight>;

/// The float32 weights that the optimizer's parameters name.
Result<ChosenWeights> weights_of_params(const OptimizerTree& tree,
                                        const std::set<std::string>& norms) {
  ChosenWeights chosen;
  const Weights weights(tree.rest);
  for (const Entry& entry : tree.params) {
    ASSIGN_OR_RETURN(weight, weights.find(entry.name, Weights::Asked::kValues));
    if (weight != nullptr && is_float32(*weight) && !is_of_norm(weight->name(), norms))
      chosen.emplace(weight, ChosenWeight{&entry, clean_name(entry.name)});
  }
  return chosen;
}

/// All float32 weights of the model. Beside an optimizer a lone key is not a weight.
ChosenWeights weights_of_model(const std::vector<const Leaf*>& leaves, bool has_optimizer,
                               const std::set<std::string>& norms) {
  ChosenWeights chosen;
  for (const Leaf* leaf : leaves) {
    const std::string name = leaf->name();
    const bool model =
        !has_optimizer || leaf->path.size() > 1 || name.find('.') != std::string::npos;
    if (model && is_float32(*leaf) && !leaf->shape.empty() && !is_of_norm(name, norms))
      chosen.emplace(leaf, ChosenWeight{nullptr, clean_name(name)});
  }
  return chosen;
}

/// Chooses the weights that are tied to a chosen one too, and with its name: all that share memory
/// get the same values. The optimizer names one of them, and torch loads all: the last wins.
void choose_tied(const std::vector<const Leaf*>& leaves, ChosenWeights& chosen) {
  std::map<std::string, ChosenWeight> by_memory;
  for (const Leaf* leaf : leaves) {
    const auto at = chosen.find(leaf);
    const std::string memory = memory_of(*leaf);
    if (at != chosen.end() && !memory.empty()) by_memory.emplace(memory, at->second);
  }
  for (const Leaf* leaf : leaves) {
    const auto tied = by_memory.find(memory_of(*leaf));
    if (tied == by_memory.end()) continue;
    const auto [at, is_new] = chosen.emplace(leaf, tied->second);
    if (at->second.entry == nullptr) at->second = tied->second;
  }
}

/// An error if the checkpoint has no state in which the format's compensation could lie.
Status check_compensation(const Document& document, const OptimizerTree& tree,
                          const std::string& format, bool has_optimizer, bool named) {
  if (!named)
    return bad(
        "the compensation of " + format +
        " is stored in the optimizer's state under the names of parameters, and this checkpoint "
        "has " +
        (has_optimizer ? "only their numbers" : "no optimizer"));
  ASSIGN_OR_RETURN(dialect, recognize(document, tree));
  if (std::string_view(dialect->name) != "lowbit")
    return bad(std::string(dialect->name) + " cannot store the compensation of " + format +
               "; convert to lowbit");
  return fine();
}

/// Where new leaves of the optimizer's state go, so that the tree keeps its order.
std::vector<Leaf>::iterator end_of_state(std::vector<Leaf>& leaves, const Path& root) {
  auto last = leaves.end();
  for (auto at = leaves.begin(); at != leaves.end(); ++at) {
    const Path& path = at->path;
    const size_t n = root.size();
    if (path.size() > n && path[n].text().starts_with("state") && is_below(path, root))
      last = at + 1;
  }
  return last;
}

/// Whether the leaf is the setting of a lowbit group that names the format of its weights, at
/// param_groups, 0, param_format or, if the state is flattened, "param_groups.NAME.param_format".
bool is_param_format(const Document& document, const Leaf& leaf, const Path& root) {
  const Path path = nested_path(document, leaf);
  const size_t n = root.size();
  if (leaf.kind != Leaf::Kind::kValue || path.size() <= n || !is_below(path, root)) return false;
  const std::string key = path[n].text(), last = path.back().text();
  return path.size() == n + 1 ? key.starts_with("param_groups.") && key.ends_with(".param_format")
                              : key == "param_groups" && last == "param_format";
}

/// The compensation of a weight as a leaf of lowbit's state.
Leaf compensation_leaf(const OptimizerTree& tree, const Entry& entry, const std::string& format,
                       const Rounding& how, Shape shape) {
  const ParamInfo info = param_info(how.format);
  const std::string key =
      "param_" + (format.ends_with("_stochastic") ? format.substr(0, format.size() - 11) : format);
  Model model;
  model.root = tree.root;
  model.flattened = tree.flattened;
  Param param;
  param.name = entry.name;
  param.index = entry.index;
  if (std::string_view(info.compensation_dtype) == "uint8")
    shape.push_back(info.compensation_bytes);
  return tensor_leaf(state_path(model, param, key), find_dtype(info.compensation_dtype),
                     std::move(shape), std::make_shared<Rounded>(how, true, nullptr));
}

}  // namespace

std::vector<std::string> weight_formats() {
  std::vector<std::string> names;
  for (int i = 0; i < param_count(); ++i) {
    if (param_info(i).bytes == 2) names.emplace_back(param_info(i).name);
  }
  return names;
}

std::set<std::string> norms_of(const std::vector<Leaf>& leaves) {
  std::set<std::string> norms;
  for (const Leaf& leaf : leaves) {
    const std::string name = leaf.name();
    for (const std::string_view end : {".running_mean", ".running_var", ".num_batches_tracked"}) {
      if (name.ends_with(end)) norms.insert(name.substr(0, name.size() - end.size()));
    }
  }
  return norms;
}

bool is_of_norm(const std::string& name, const std::set<std::string>& norms) {
  return norms.contains(name.substr(0, name.rfind('.')));
}

Result<Document> with_weights(Document document, const std::string& format, uint64_t seed,
                              DialectReport& report) {
  RETURN_IF_ERROR(check_format(format));
  OptimizerTree tree;
  const bool optimizer = has_optimizer_tree(document);
  if (optimizer) {
    ASSIGN_OR_RETURN(found, optimizer_tree_of(document));
    tree = std::move(found);
  }
  RETURN_IF_ERROR(check_untouched(tree));
  const bool named =
      optimizer && std::ranges::any_of(tree.params, [](const Entry& e) { return !e.name.empty(); });
  std::vector<const Leaf*> outside = tree.rest;
  if (!optimizer) {
    for (const Leaf& leaf : document.leaves) outside.push_back(&leaf);
  }
  const std::set<std::string> norms = norms_of(document.leaves);
  ASSIGN_OR_RETURN(
      chosen, named ? weights_of_params(tree, norms) : weights_of_model(outside, optimizer, norms));
  choose_tied(outside, chosen);
  if (chosen.empty()) return bad("the checkpoint has no float32 weights to round");
  const int number = find_param(format);
  const bool compensated = param_info(number).compensation_bytes > 0;
  if (compensated) RETURN_IF_ERROR(check_compensation(document, tree, format, optimizer, named));

  Document out = document;
  out.leaves.clear();
  std::vector<Leaf> compensation;
  std::map<std::string, Rounding> tied;
  for (const Leaf& leaf : document.leaves) {
    out.leaves.push_back(leaf);
    Leaf& to = out.leaves.back();
    if (compensated && is_param_format(document, leaf, tree.root)) {
      to.value = Value::words(format);
      to.blob = nullptr;  // the item of a directory, which has the old value
    }
    const auto at = chosen.find(&leaf);
    if (at == chosen.end()) continue;
    const auto& [entry, name] = at->second;
    to.dtype = find_dtype(param_info(number).dtype);
    to.stored = nullptr;
    to.tied = memory_of(leaf).empty() ? "" : memory_of(leaf) + " " + name;
    if (const auto first = tied.find(to.tied); first != tied.end()) {
      to.source = std::make_shared<Rounded>(first->second, false, nullptr);
      continue;
    }
    report.states.push_back({.param = printable(name),
                             .state = "weight",
                             .from = "float32",
                             .to = format,
                             .exact = false});
    const Rounding how{number, random_key(seed, 0, stream_of(name)), floats_of(leaf)};
    to.source = std::make_shared<Rounded>(how, false, &report.states.back());
    if (!to.tied.empty()) tied.emplace(to.tied, how);
    if (compensated)
      compensation.push_back(compensation_leaf(tree, *entry, format, how, leaf.shape));
  }
  const auto place = optimizer ? end_of_state(out.leaves, tree.root) : out.leaves.end();
  out.leaves.insert(place, compensation.begin(), compensation.end());
  return out;
}

}  // namespace lowbit::ckpt
