// Two checkpoints, side by side: what is compared, and where they differ.
#pragma once

#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "container/document/document.h"
#include "dialect/model/model.h"
#include "pipeline/commands.h"
#include "pipeline/select.h"

namespace lowbit::ckpt {

/// Every difference is one entry; the order is that of names.
class Comparison {
 public:
  /// `total`: bytes to be read, for progress.
  Comparison(const DiffOptions& options, uint64_t total) : options_(options), total_(total) {}

  /// Whether something of these names is compared at all.
  bool wants(const std::vector<std::string>& names);
  /// Whether there are patterns, and nothing that they leave to be compared.
  bool nothing_wanted() const {
    return wanted_ == 0 && !(options_.select.include.empty() && options_.select.exclude.empty());
  }
  /// An error where a pattern fits nothing that there was.
  Status check_patterns() const { return check_selection(met_, options_.select); }
  /// A warning for each pattern of `exclude` that fits nothing that there was.
  std::vector<std::string> warnings() const { return warn_of_exclude(met_, options_.select); }

  void differ(const std::string& name, std::string what);
  /// The same bytes, in the same dtype and shape.
  Status bytes(const std::string& name, const Leaf& a, const Leaf& b);
  /// The same numbers, however they are kept.
  Status numbers(const std::string& name, const Shape& shape, Floats& a, Floats& b);
  void value(const std::string& name, const Value& a, const Value& b);
  /// Whether the shapes are the same.
  bool alike(const std::string& name, const Shape& a, const Shape& b);

  /// Notes an object whose content cannot be compared.
  void skip(const std::string& name);
  const std::vector<std::string>& skipped() const { return skipped_; }

  Json take() { return std::move(out_); }

 private:
  struct Tally {
    uint64_t count = 0, first = 0;
    double limit = 0;
    void take(uint64_t at, double distance) {
      if (count++ == 0) first = at;
      if (!(distance <= limit)) limit = distance;
    }
  };

  /// `relative`: the distance by the larger norm, null where only bytes were compared.
  void report(const std::string& name, const Shape& shape, const Tally& tally,
              const double* relative);
  Status advance(uint64_t bytes);

  const DiffOptions& options_;
  std::vector<std::string> met_;  // names, for patterns to fit
  std::vector<std::string> skipped_;
  uint64_t total_, done_ = 0;
  uint64_t wanted_ = 0;  // how often something was
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
      RETURN_IF_ERROR(both(name, x, y->second));
    }
  }
  for (const auto& [name, y] : b) {
    if (!a.contains(name) && wants(name, y)) comparison.differ(name, "is only in the second");
  }
  return fine();
}

}  // namespace lowbit::ckpt
