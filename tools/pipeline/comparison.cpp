#include "pipeline/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "dialect/numbers/square_sum.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kComparisonPiece = 1u << 18;  // elements
constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_whole(const Value& v) { return v.is(Value::Kind::kInt) || v.is(Value::Kind::kBool); }

bool same_real(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/// The items of a set, which has no order: each as it is pickled, sorted.
std::vector<std::string> sorted_items(const Value& set) {
  std::vector<std::string> out;
  for (const Value& item : set.items) {
    PickleWriter to(2);
    write_value(to, item);
    out.push_back(to.finish());
  }
  std::ranges::sort(out);
  return out;
}

/// 3, 3.0 and True count as equal, and a list and a tuple of the same: containers and dialects
/// disagree about them. NaN equals NaN.
bool same_value(const Value& a, const Value& b) {
  const auto is_number = [](const Value& v) { return v.is(Value::Kind::kFloat) || is_whole(v); };
  const auto number = [](const Value& v) {
    return v.is(Value::Kind::kFloat) ? v.real : static_cast<double>(v.integer);
  };
  if (is_whole(a) && is_whole(b)) return a.integer == b.integer;
  if (is_number(a) && is_number(b)) return same_real(number(a), number(b));
  if (a.items.size() != b.items.size()) return false;
  if (a.is(Value::Kind::kSet) && b.is(Value::Kind::kSet)) return sorted_items(a) == sorted_items(b);
  const bool alike = a.kind == b.kind && a.integer == b.integer && a.text == b.text;
  return (alike || (a.is_row() && b.is_row())) &&
         std::equal(a.items.begin(), a.items.end(), b.items.begin(), same_value);
}

}  // namespace

bool Comparison::wants(const std::vector<std::string>& names) {
  if (!options_.select.include.empty() || !options_.select.exclude.empty())
    met_.insert(met_.end(), names.begin(), names.end());
  const bool is = selected(options_.select, names);
  wanted_ += is;
  return is;
}

void Comparison::differ(const std::string& name, std::string what) {
  out_.push_back({{"name", printable(name)}, {"what", std::move(what)}});
}

void Comparison::skip(const std::string& name) { skipped_.push_back(printable(name)); }

Status Comparison::bytes(const std::string& name, const Leaf& a, const Leaf& b) {
  if (!alike(name, a.shape, b.shape)) return fine();
  if (a.dtype != b.dtype) {
    differ(name, std::string("is ") + a.dtype->name + " in the first, " + b.dtype->name +
                     " in the second");
    return fine();
  }
  const auto width = static_cast<uint64_t>(a.dtype->bytes);
  const uint64_t n = volume(a.shape);
  std::string x, y;
  Tally tally;
  for (uint64_t at = 0; at < n; at += kComparisonPiece) {
    const uint64_t count = std::min(kComparisonPiece, n - at);
    x.resize(count * width);
    y.resize(count * width);
    RETURN_IF_ERROR(a.source->read(at, count, x.data()));
    RETURN_IF_ERROR(b.source->read(at, count, y.data()));
    if (x != y) {
      for (uint64_t i = 0; i < count; ++i) {
        if (std::memcmp(&x[i * width], &y[i * width], width) != 0) tally.take(at + i, 0);
      }
    }
    RETURN_IF_ERROR(advance(count * width));
  }
  if (tally.count > 0) report(name, a.shape, tally, nullptr);
  return fine();
}

Status Comparison::numbers(const std::string& name, const Shape& shape, Floats& a, Floats& b) {
  const uint64_t n = volume(shape);
  std::vector<double> x(std::min(kComparisonPiece, n)), y(x.size());
  Tally tally;
  SquareSum difference, norm_a, norm_b;
  for (uint64_t at = 0; at < n; at += kComparisonPiece) {
    const uint64_t count = std::min(kComparisonPiece, n - at);
    RETURN_IF_ERROR(a.read_doubles(at, count, x.data()));
    RETURN_IF_ERROR(b.read_doubles(at, count, y.data()));
    for (uint64_t i = 0; i < count; ++i) {
      const double p = x[i], q = y[i];
      // An Inf in both is not a difference, and would make every other one small beside the norm.
      if (std::isfinite(p)) norm_a.add(p);
      if (std::isfinite(q)) norm_b.add(q);
      if (p == q || (std::isnan(p) && std::isnan(q))) continue;
      // A NaN beside a number is as far from it as can be.
      const double distance = std::isnan(p - q) ? kInfinity : std::abs(p - q);
      difference.add(distance);
      tally.take(at + i, distance);
    }
    RETURN_IF_ERROR(advance(count * sizeof(float)));
  }
  const double relative = difference.root() / std::max(norm_a.root(), norm_b.root());
  if (tally.count > 0 && !(relative <= options_.tolerance)) report(name, shape, tally, &relative);
  return fine();
}

void Comparison::value(const std::string& name, const Value& a, const Value& b) {
  if (wants({name}) && !same_value(a, b)) differ(name, "has another value");
}

bool Comparison::alike(const std::string& name, const Shape& a, const Shape& b) {
  if (a == b) return true;
  differ(name,
         "has the shape " + shape_text(a) + " in the first, " + shape_text(b) + " in the second");
  return false;
}

void Comparison::report(const std::string& name, const Shape& shape, const Tally& tally,
                        const double* relative) {
  const Shape at = index_of(shape, tally.first);
  Json entry{{"name", printable(name)},
             {"what", std::to_string(tally.count) + " of " + std::to_string(volume(shape)) +
                          " elements differ, the first at " + shape_text(at)},
             {"first", at},
             {"count", tally.count}};
  if (relative != nullptr) {
    entry["max"] = error_number(tally.limit);
    entry["relative"] = error_number(*relative);
  }
  out_.push_back(std::move(entry));
}

Status Comparison::advance(uint64_t bytes) {
  done_ += bytes;
  return options_.progress(std::min(done_, total_), total_) ? fine() : Status(interrupted());
}

}  // namespace lowbit::ckpt
