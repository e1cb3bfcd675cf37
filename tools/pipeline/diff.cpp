#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "container/open.h"
#include "container/subclass_cut.h"
#include "dialect/coding.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/recorded.h"
#include "pipeline/select.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 1u << 18;  // elements

/// Two checkpoints, side by side. Every difference is one entry; the order is that of names.
class Comparison {
 public:
  Comparison(const DiffOptions& options, uint64_t total) : options_(options), total_(total) {}

  /// Whether something of these names is compared at all.
  bool wants(const std::vector<std::string>& names) {
    if (!options_.select.include.empty()) met_.insert(met_.end(), names.begin(), names.end());
    return selected(options_.select, names);
  }
  /// An error where a pattern fits nothing that there was.
  Status check_patterns() const { return check_selection(met_, options_.select); }

  void differ(const std::string& name, std::string what) {
    out_.push_back({{"name", printable(name)}, {"what", std::move(what)}});
  }

  /// The same bytes, in the same dtype and shape.
  Status bytes(const std::string& name, const Leaf& a, const Leaf& b) {
    if (!alike(name, a, b)) return fine();
    if (a.dtype != b.dtype) {
      differ(name, std::string("is ") + a.dtype->name + " in the first, " + b.dtype->name +
                       " in the second");
      return fine();
    }
    const auto width = static_cast<uint64_t>(a.dtype->bytes);
    const uint64_t n = volume(a.shape);
    std::string x, y;
    Tally tally;
    for (uint64_t at = 0; at < n; at += kPiece) {
      const uint64_t count = std::min(kPiece, n - at);
      x.resize(count * width);
      y.resize(count * width);
      LB_CHECK(a.source->read(at, count, x.data()));
      LB_CHECK(b.source->read(at, count, y.data()));
      for (uint64_t i = 0; x != y && i < count; ++i) {
        if (std::memcmp(&x[i * width], &y[i * width], width) != 0) tally.take(at + i, 0);
      }
      LB_CHECK(advance(count * width));
    }
    if (tally.count > 0) report(name, a.shape, n, tally, nullptr);
    return fine();
  }

  /// The same numbers, however they are kept.
  Status numbers(const std::string& name, const Shape& shape, Floats& a, Floats& b) {
    const uint64_t n = volume(shape);
    std::vector<float> x(std::min(kPiece, n)), y(x.size());
    Tally tally;
    double difference = 0, norm_a = 0, norm_b = 0;
    for (uint64_t at = 0; at < n; at += kPiece) {
      const uint64_t count = std::min(kPiece, n - at);
      LB_CHECK(a.read(at, count, x.data()));
      LB_CHECK(b.read(at, count, y.data()));
      for (uint64_t i = 0; i < count; ++i) {
        const double p = x[i], q = y[i];
        norm_a += p * p;
        norm_b += q * q;
        if (p == q || (std::isnan(p) && std::isnan(q))) continue;
        difference += (p - q) * (p - q);
        tally.take(at + i, std::abs(p - q));
      }
      LB_CHECK(advance(count * sizeof(float)));
    }
    const double relative = std::sqrt(difference / std::max(norm_a, norm_b));
    if (tally.count > 0 && !(relative <= options_.tolerance))
      report(name, shape, n, tally, &relative);
    return fine();
  }

  void value(const std::string& name, const Value& a, const Value& b) {
    if (wants({name}) && !(a == b) && !same_number(a, b)) differ(name, "has another value");
  }

  bool alike(const std::string& name, const Leaf& a, const Leaf& b) {
    if (a.shape == b.shape) return true;
    differ(name, "has the shape " + shape_text(a.shape) + " in the first, " + shape_text(b.shape) +
                     " in the second");
    return false;
  }

  Json take() { return std::move(out_); }

 private:
  struct Tally {
    uint64_t count = 0, first = 0;
    double most = 0;
    void take(uint64_t at, double distance) {
      if (count++ == 0) first = at;
      if (!(distance <= most)) most = distance;
    }
  };

  /// 3 and 3.0 and True are not told apart: containers and dialects disagree about them.
  static bool same_number(const Value& a, const Value& b) {
    const auto number = [](const Value& v) {
      return v.is(Value::Kind::kFloat) ? v.real : static_cast<double>(v.integer);
    };
    const auto is_number = [](const Value& v) {
      return v.is(Value::Kind::kFloat) || v.is(Value::Kind::kInt) || v.is(Value::Kind::kBool);
    };
    const auto is_row = [](const Value& v) {
      return v.is(Value::Kind::kList) || v.is(Value::Kind::kTuple) || v.is(Value::Kind::kSize);
    };
    if (is_number(a) && is_number(b)) return number(a) == number(b);
    if (!is_row(a) || !is_row(b) || a.items.size() != b.items.size()) return false;
    for (size_t i = 0; i < a.items.size(); ++i) {
      if (!(a.items[i] == b.items[i]) && !same_number(a.items[i], b.items[i])) return false;
    }
    return true;
  }

  void report(const std::string& name, const Shape& shape, uint64_t n, const Tally& tally,
              const double* relative) {
    Shape at;
    uint64_t element = tally.first;
    for (const int64_t stride : row_major(shape)) {
      at.push_back(static_cast<int64_t>(element / static_cast<uint64_t>(stride)));
      element %= static_cast<uint64_t>(stride);
    }
    Json entry{{"name", printable(name)},
               {"what", std::to_string(tally.count) + " of " + std::to_string(n) +
                            " elements differ, the first at " + shape_text(at)},
               {"first", at},
               {"count", tally.count}};
    if (relative != nullptr) {
      entry["max"] = tally.most;
      entry["relative"] = *relative;
    }
    out_.push_back(std::move(entry));
  }

  Status advance(uint64_t bytes) {
    done_ += bytes;
    return options_.progress(std::min(done_, total_), total_) ? fine() : Status(interrupted());
  }

  const DiffOptions& options_;
  std::vector<std::string> met_;  // names, for patterns to fit
  uint64_t total_, done_ = 0;
  Json out_ = Json::array();
};

/// Calls `both` for names of both, and reports the others.
template <class T, class Both>
Status pair_up(Comparison& comparison, const std::map<std::string, T>& a,
               const std::map<std::string, T>& b, const Both& both) {
  const auto wants = [&](const std::string& name, T x) {
    // A parameter's own name is not what is selected, but those of its states.
    if constexpr (std::is_same_v<T, const Param*>)
      return true;
    else if constexpr (std::is_same_v<T, const State*>)
      return comparison.wants(names_of(name, *x));
    else
      return comparison.wants({name});
  };
  for (const auto& [name, x] : a) {
    const auto y = b.find(name);
    if (!wants(name, x) && (y == b.end() || !wants(name, y->second))) continue;
    if (y == b.end()) {
      comparison.differ(name, "is only in the first");
    } else {
      LB_CHECK(both(name, x, y->second));
    }
  }
  for (const auto& [name, y] : b) {
    if (!a.contains(name) && wants(name, y)) comparison.differ(name, "is only in the second");
  }
  return fine();
}

using Leaves = std::map<std::string, const Leaf*>;

Leaves leaves_of(const std::vector<Leaf>& leaves) {
  Leaves out;
  for (const Leaf& leaf : leaves) out.emplace(leaf.name(), &leaf);
  return out;
}

/// Two subclasses, or chunks of them, by class, attributes and parts.
Status compare_parts(Comparison& comparison, const std::string& name, const Leaf& a,
                     const Leaf& b) {
  if (a.kind != b.kind || a.cls != b.cls || a.parts.size() != b.parts.size()) {
    comparison.differ(name, "is kept in another way in the second");
    return fine();
  }
  if (a.kind == Leaf::Kind::kTensor) return comparison.bytes(name, a, b);
  if (!(a.attributes == b.attributes)) comparison.differ(name, "has other attributes");
  for (size_t i = 0; i < a.parts.size(); ++i) {
    const std::string part = a.parts[i].name();
    const auto other = std::find_if(b.parts.begin(), b.parts.end(),
                                    [&](const Leaf& leaf) { return leaf.name() == part; });
    if (other == b.parts.end()) {
      comparison.differ(name + "." + part, "is only in the first");
    } else {
      LB_CHECK(comparison.bytes(name + "." + part, a.parts[i], *other));
    }
  }
  return fine();
}

/// Quantized tensors by what they are kept as: chunk by chunk where both are cut alike, else as
/// wholes.
Status compare_subclasses(Comparison& comparison, const std::string& name, const Document& first,
                          const Leaf& a, const Document& second, const Leaf& b) {
  if (!is_subclass(a) || !is_subclass(b)) {
    comparison.differ(name, "is kept in another way in the second");
    return fine();
  }
  if (!comparison.alike(name, a, b)) return fine();
  const auto cut_alike = [](const Tensor& x, const Tensor& y) {
    return std::equal(
        x.chunks.begin(), x.chunks.end(), y.chunks.begin(), y.chunks.end(),
        [](const Chunk& p, const Chunk& q) { return p.offset == q.offset && p.shape == q.shape; });
  };
  if (a.kind == Leaf::Kind::kTensor && b.kind == Leaf::Kind::kTensor &&
      cut_alike(*a.stored, *b.stored)) {
    for (size_t i = 0; i < a.stored->chunks.size(); ++i) {
      LB_TRY(x, subclass_chunk(first, a, a.stored->chunks[i]));
      LB_TRY(y, subclass_chunk(second, b, b.stored->chunks[i]));
      LB_CHECK(compare_parts(comparison, a.stored->chunks.size() == 1 ? name : x.name(), x, y));
    }
    return fine();
  }
  const auto x = whole_subclass(first, a), y = whole_subclass(second, b);
  if (x.ok() && y.ok()) return compare_parts(comparison, name, x.value(), y.value());
  comparison.differ(name,
                    "is quantized in other blocks in the second; diff without --bytes "
                    "compares its numbers");
  return fine();
}

/// Pickles of values that are no plain data: what is in them is not looked at, their bytes are.
Status compare_opaque(Comparison& comparison, const std::string& name, const Document& first,
                      const Leaf& a, const Document& second, const Leaf& b) {
  LB_TRY(x, value_digest(*first.manifest, *a.blob));
  LB_TRY(y, value_digest(*second.manifest, *b.blob));
  if (x != y) comparison.differ(name, "is no plain data, and its bytes differ");
  return fine();
}

Status compare_leaves(Comparison& comparison, const Document& first, const std::vector<Leaf>& a,
                      const Document& second, const std::vector<Leaf>& b, bool by_bytes) {
  return pair_up(comparison, leaves_of(a), leaves_of(b),
                 [&](const std::string& name, const Leaf* x, const Leaf* y) -> Status {
                   if (is_subclass(*x) || is_subclass(*y))
                     return compare_subclasses(comparison, name, first, *x, second, *y);
                   if (x->kind != y->kind) {
                     comparison.differ(name, "is something else in the second");
                   } else if (x->kind == Leaf::Kind::kValue) {
                     comparison.value(name, x->value, y->value);
                   } else if (x->kind == Leaf::Kind::kOpaque) {
                     return compare_opaque(comparison, name, first, *x, second, *y);
                   } else {
                     const auto p = by_bytes ? nullptr : floats_of(*x),
                                q = by_bytes ? nullptr : floats_of(*y);
                     if (p == nullptr || q == nullptr) return comparison.bytes(name, *x, *y);
                     if (comparison.alike(name, *x, *y))
                       return comparison.numbers(name, x->shape, *p, *q);
                   }
                   return fine();
                 });
}

/// Parameters by name where both have names, else by number.
std::map<std::string, const Param*> params_of(const Model& model, bool by_name) {
  std::map<std::string, const Param*> out;
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Param& p = model.params[i];
    out.emplace(
        by_name ? p.name
                : "parameter " + std::to_string(p.index < 0 ? static_cast<int64_t>(i) : p.index),
        &p);
  }
  return out;
}

Status compare_params(Comparison& comparison, const Model& a, const Model& b) {
  const auto named = [](const Model& m) {
    for (const Param& p : m.params) {
      if (p.name.empty()) return false;
    }
    return true;
  };
  const bool by_name = named(a) && named(b);
  return pair_up(
      comparison, params_of(a, by_name), params_of(b, by_name),
      [&](const std::string& name, const Param* x, const Param* y) -> Status {
        std::map<std::string, const State*> s, t;
        for (const State& state : x->states) s.emplace(name + "." + state.name, &state);
        for (const State& state : y->states) t.emplace(name + "." + state.name, &state);
        LB_CHECK(pair_up(comparison, s, t,
                         [&](const std::string& which, const State* p, const State* q) -> Status {
                           if (volume(p->shape) == volume(q->shape))
                             return comparison.numbers(which, p->shape, *p->values, *q->values);
                           comparison.differ(which, "has the shape " + shape_text(p->shape) +
                                                        " in the first, " + shape_text(q->shape) +
                                                        " in the second");
                           return fine();
                         }));
        for (const auto& [key, value] : x->numbers) {
          for (const auto& [other, second] : y->numbers) {
            if (key == other) comparison.value(name + "." + key, value, second);
          }
        }
        return fine();
      });
}

/// Settings that both have: each dialect has some of its own.
void compare_groups(Comparison& comparison, const Model& a, const Model& b) {
  if (a.groups.size() != b.groups.size() && comparison.wants({"param_groups"}))
    return comparison.differ("param_groups", "are not as many in the second");
  for (size_t g = 0; g < std::min(a.groups.size(), b.groups.size()); ++g) {
    for (const auto& [key, value] : a.groups[g].settings) {
      for (const auto& [other, second] : b.groups[g].settings) {
        if (key == other)
          comparison.value("param_groups." + std::to_string(g) + "." + key, value, second);
      }
    }
  }
}

Result<Model> model_of(const Document& document) {
  LB_TRY(dialect, recognize(document));
  return dialect->read(std::make_shared<Document>(document));
}

uint64_t bytes_of(const Document& document) {
  uint64_t bytes = 0;
  for (const Leaf& leaf : document.leaves) {
    if (leaf.kind == Leaf::Kind::kTensor) bytes += leaf.bytes();
  }
  return bytes;
}

}  // namespace

Result<Json> diff(const std::string& first, const std::string& second, const DiffOptions& options) {
  LB_TRY(a, open_checkpoint(first));
  LB_TRY(b, open_checkpoint(second));
  Comparison comparison(options, std::max(bytes_of(a), bytes_of(b)));
  Json out{{"first", printable(first)}, {"second", printable(second)}, {"by", "bytes"}};
  auto x = options.bytes ? Result<Model>(bad("")) : model_of(a);
  auto y = options.bytes ? Result<Model>(bad("")) : model_of(b);
  if (x.ok() && y.ok()) {
    out["by"] = "meaning";
    out["dialects"] = {x.value().dialect, y.value().dialect};
    LB_CHECK(compare_params(comparison, x.value(), y.value()));
    compare_groups(comparison, x.value(), y.value());
    LB_CHECK(compare_leaves(comparison, a, x.value().rest, b, y.value().rest, false));
  } else {
    if (!options.bytes) out["by"] = "leaves";
    LB_CHECK(compare_leaves(comparison, a, a.leaves, b, b.leaves, options.bytes));
  }
  LB_CHECK(comparison.check_patterns());
  LB_CHECK(a.finish());
  LB_CHECK(b.finish());
  out["differences"] = comparison.take();
  out["same"] = out["differences"].empty();
  return out;
}

}  // namespace lowbit::ckpt
