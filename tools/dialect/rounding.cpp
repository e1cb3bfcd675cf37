#include "dialect/rounding.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "catalog.h"
#include "core/random.h"
#include "cpu/step.h"
#include "dialect/coding.h"
#include "dialect/leaves.h"
#include "dialect/master.h"
#include "dialect/skeleton.h"
#include "dialect/weights.h"
#include "io/crc32.h"
#include "io/lent.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 1u << 14;

/// The one rounding that the weight and what is beside it come from.
struct Rounding {
  int format;
  RandomKey key;
  std::shared_ptr<Floats> values;
};

/// Weights, or what is kept beside them.
class Rounded : public Source {
 public:
  Rounded(Rounding how, bool beside, StateReport* report)
      : how_(std::move(how)),
        info_(param_info(how_.format)),
        beside_(beside),
        errors_(report),
        width_(static_cast<uint64_t>(beside ? info_.extra_bytes : info_.bytes)),
        // split16's two bytes are elements of their own.
        parts_(beside && std::string_view(info_.extra_dtype) == "uint8" ? 2 : 1) {}

  Status read(uint64_t first, uint64_t count, void* out) override {
    auto* to = static_cast<char*>(out);
    const Lent memory(x_, back_, random_, stored_, extra_);
    while (count > 0) {
      const uint64_t begin = first / parts_;
      const uint64_t end = std::min((first + count + parts_ - 1) / parts_, begin + kPiece);
      LB_CHECK(round(begin, end - begin));
      const uint64_t skip = first % parts_, n = std::min(count, (end - begin) * parts_ - skip);
      const uint64_t each = width_ / parts_;
      std::memcpy(to, (beside_ ? extra_ : stored_).data() + skip * each, n * each);
      first += n, count -= n, to += n * each;
    }
    return fine();
  }

 private:
  Status round(uint64_t first, uint64_t n) {
    x_.resize(n), random_.resize(n), stored_.resize(n * static_cast<uint64_t>(info_.bytes));
    extra_.resize(n * static_cast<uint64_t>(std::max(info_.extra_bytes, 1)));
    LB_CHECK(how_.values->read(first, n, x_.data()));
    if (info_.random) {
      Random8 bits{};
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t element = first + i;
        if (i == 0 || element % 8 == 0) bits = random8(how_.key, element / 8);
        random_[i] = static_cast<uint16_t>(bits.bits16(static_cast<int>(element % 8)));
      }
    }
    const auto& leaf = cpu::leaves();
    void* extra = info_.extra_bytes > 0 ? extra_.data() : nullptr;
    leaf.store_param[how_.format](x_.data(), stored_.data(), extra, static_cast<int>(n),
                                  info_.random ? random_.data() : nullptr);
    if (errors_.wanted()) {
      back_.resize(n);
      leaf.load_param[how_.format](stored_.data(), extra, back_.data(), static_cast<int>(n));
      errors_.add(x_.data(), back_.data(), n);
    }
    return fine();
  }

  const Rounding how_;
  const ParamInfo info_;
  const bool beside_;
  ErrorSum errors_;
  const uint64_t width_, parts_;
  std::vector<float> x_, back_;
  std::vector<uint16_t> random_;
  std::vector<char> stored_, extra_;
};

/// Norms that keep running statistics, by the path of their module.
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

}  // namespace

std::vector<std::string> weight_formats() {
  std::vector<std::string> names;
  for (int i = 0; i < param_count(); ++i) {
    if (param_info(i).bytes == 2) names.emplace_back(param_info(i).name);
  }
  return names;
}

Result<Document> with_weights(Document document, const std::string& format, uint64_t seed,
                              DialectReport& report) {
  const std::vector<std::string> all = weight_formats();
  if (std::find(all.begin(), all.end(), format) == all.end()) {
    std::string names;
    for (const std::string& name : all) names += (names.empty() ? "" : ", ") + name;
    return Error{Exit::kUsage,
                 "weights are not kept as " + printable(format) + "; there are " + names};
  }
  const int number = find_param(format);
  const ParamInfo info = param_info(number);
  const bool extra = info.extra_bytes > 0;
  const std::string key =
      "param_" + (format.ends_with("_stochastic") ? format.substr(0, format.size() - 11) : format);

  Skeleton skeleton;
  const bool optimizer = has_skeleton(document);
  if (optimizer) {
    LB_TRY(found, skeleton_of(document));
    skeleton = std::move(found);
  }
  for (const Entry& entry : skeleton.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (name.starts_with("param_"))
        return bad(shown(entry) + ": already keeps " + printable(name) + " beside its weight");
      if (is_master(name))
        return bad(shown(entry) + ": keeps its master weight in " + printable(name) +
                   " still, which is float32");
    }
  }
  const std::set<std::string> norms = norms_of(document.leaves);
  std::vector<const Leaf*> outside = skeleton.rest;
  if (!optimizer) {
    for (const Leaf& leaf : document.leaves) outside.push_back(&leaf);
  }
  // Which leaves are rounded, and whose they are.
  std::map<const Leaf*, const Entry*> chosen;
  const bool named = optimizer && std::any_of(skeleton.params.begin(), skeleton.params.end(),
                                              [](const Entry& e) { return !e.name.empty(); });
  if (named) {
    TensorsByName names;
    for (const Leaf* leaf : outside) names.add(*leaf);
    for (const Entry& entry : skeleton.params) {
      const Leaf* weight = entry.name.empty() ? nullptr : names.find(entry.name);
      if (weight != nullptr && is_float32(*weight) && !is_of_norm(weight->name(), norms))
        chosen.emplace(weight, &entry);
    }
  } else {
    for (const Leaf* leaf : outside) {
      const bool model =
          !optimizer || (leaf->path.size() > 1 || leaf->name().find('.') != std::string::npos);
      const std::string name = leaf->name();
      const bool statistic = norms.contains(name.substr(0, name.rfind('.')));
      if (model && is_float32(*leaf) && !leaf->shape.empty() && !statistic)
        chosen.emplace(leaf, nullptr);
    }
  }
  if (chosen.empty()) return bad("the checkpoint has no float32 weights to round");
  std::string own;
  if (extra) {
    if (!named)
      return bad("what " + format +
                 " keeps beside weights belongs into the optimizer's state, by the names of its "
                 "parameters, and "
                 "this checkpoint has " +
                 (optimizer ? "only their numbers" : "no optimizer"));
    LB_TRY(dialect, recognize(document));
    own = dialect->name;
    if (own != "lowbit")
      return bad(std::string(own) + " has no place for what " + format +
                 " keeps beside weights; convert to lowbit");
  }
  Model model;
  model.root = skeleton.root;
  model.flattened = skeleton.flattened;
  Document out = document;
  out.leaves.clear();
  std::vector<Leaf> beside;
  for (const Leaf& leaf : document.leaves) {
    out.leaves.push_back(leaf);
    Leaf& to = out.leaves.back();
    // Lowbit's groups say how weights are kept.
    if (own == "lowbit" && leaf.kind == Leaf::Kind::kValue && !leaf.path.empty() &&
        leaf.path.back().text() == "param_format" && leaf.path.size() > skeleton.root.size() &&
        leaf.path[skeleton.root.size()].text() == "param_groups")
      to.value = Value::words(format);
    const auto at = chosen.find(&leaf);
    if (at == chosen.end()) continue;
    const std::string name =
        at->second != nullptr ? clean_name(at->second->name) : clean_name(leaf.name());
    report.states.push_back({.param = printable(name),
                             .state = "weight",
                             .from = "float32",
                             .to = format,
                             .exact = false});
    const RandomKey random = random_key(seed, 0, crc32(0, name.data(), name.size()));
    const Rounding how{number, random, locked(floats_of(leaf))};
    to.dtype = find_dtype(info.dtype);
    to.stored = nullptr;
    to.source = std::make_shared<Rounded>(how, false, &report.states.back());
    if (!extra) continue;
    Param param;
    param.name = at->second->name;
    param.index = at->second->index;
    Shape shape = leaf.shape;
    const bool bytes = std::string_view(info.extra_dtype) == "uint8";
    if (bytes) shape.push_back(info.extra_bytes);
    beside.push_back(tensor_leaf(state_path(model, param, key), find_dtype(info.extra_dtype), shape,
                                 std::make_shared<Rounded>(how, true, nullptr)));
  }
  // Beside the other state, so that the tree's order is kept.
  auto last = out.leaves.end();
  for (auto at = out.leaves.begin(); at != out.leaves.end(); ++at) {
    const Path& path = at->path;
    const size_t n = skeleton.root.size();
    if (optimizer && path.size() > n && path[n].text().starts_with("state") &&
        std::equal(skeleton.root.begin(), skeleton.root.end(), path.begin()))
      last = at + 1;
  }
  out.leaves.insert(last, beside.begin(), beside.end());
  return out;
}

}  // namespace lowbit::ckpt
