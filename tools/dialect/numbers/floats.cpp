#include "dialect/numbers/floats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kFloatsPiece = 1u << 16;  // values at a time

class LeafFloats : public Floats {
 public:
  explicit LeafFloats(const Leaf& leaf)
      : source_(leaf.source), dtype_(leaf.dtype), name_(leaf.name()) {}
  Status do_read_doubles(uint64_t first, uint64_t count, double* out) override {
    if (source_ == nullptr) return bad(name_ + ": is not a plain tensor");
    if (dtype_->name == std::string_view("float64")) return source_->read(first, count, out);
    return Floats::do_read_doubles(first, count, out);
  }
  Status do_read(uint64_t first, uint64_t count, float* out) override {
    const std::string_view dtype = dtype_->name;
    if (source_ == nullptr) return bad(name_ + ": is not a plain tensor");
    if (dtype == "float32") return source_->read(first, count, out);
    const auto width = static_cast<uint64_t>(dtype_->bytes);
    const ScratchBuffer memory(bytes_);
    while (count > 0) {
      const uint64_t n = std::min(count, kFloatsPiece);
      bytes_.resize(n * width);
      RETURN_IF_ERROR(source_->read(first, n, bytes_.data()));
      if (dtype == "bfloat16") {
        to_float<uint16_t>(n, out, [](uint16_t b) { return bfloat16_to_float(b); });
      } else if (dtype == "float16") {
        to_float<uint16_t>(n, out, [](uint16_t b) { return half_to_float(b); });
      } else if (dtype == "float64") {
        to_float<double>(n, out, [](double x) { return static_cast<float>(x); });
      } else {
        return bad(name_ + ": is " + std::string(dtype) + ", not a floating-point dtype");
      }
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  template <class T, class Fn>
  void to_float(uint64_t n, float* out, const Fn& fn) const {
    for (uint64_t i = 0; i < n; ++i) {
      T x;
      std::memcpy(&x, bytes_.data() + i * sizeof x, sizeof x);
      out[i] = fn(x);
    }
  }

  const std::shared_ptr<Source> source_;
  const Dtype* const dtype_;
  const std::string name_;
  std::vector<char> bytes_;
};

class RoundedFloats : public LeafFloats {
 public:
  RoundedFloats(const Leaf& leaf, std::shared_ptr<RoundingError> error)
      : LeafFloats(leaf), error_(std::move(error)) {}
  Status do_read(uint64_t first, uint64_t count, float* out) override {
    const ScratchBuffer memory(exact_);
    while (count > 0) {
      const uint64_t n = std::min(count, kFloatsPiece);
      exact_.resize(n);
      RETURN_IF_ERROR(do_read_doubles(first, n, exact_.data()));
      for (uint64_t i = 0; i < n; ++i) {
        out[i] = static_cast<float>(exact_[i]);
        if (!std::isfinite(exact_[i])) continue;
        const double difference = std::fabs(exact_[i] - static_cast<double>(out[i]));
        error_->limit = std::max(error_->limit, difference);
        error_->values.add(exact_[i]);
        error_->differences.add(difference);
      }
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  const std::shared_ptr<RoundingError> error_;
  std::vector<double> exact_;
};

}  // namespace

Status Floats::do_read_doubles(uint64_t first, uint64_t count, double* out) {
  std::vector<float> values(std::min(count, kFloatsPiece));
  while (count > 0) {
    const uint64_t n = std::min<uint64_t>(count, values.size());
    RETURN_IF_ERROR(do_read(first, n, values.data()));
    std::copy_n(values.begin(), n, out);
    first += n, count -= n, out += n;
  }
  return fine();
}

double RoundingError::relative() const {
  if (std::isinf(limit)) return limit;
  const double norm = values.root();
  return norm > 0 ? differences.root() / norm : 0;
}

std::shared_ptr<Floats> floats_of(const Leaf& leaf) { return std::make_shared<LeafFloats>(leaf); }

std::shared_ptr<Floats> rounded_floats(const Leaf& leaf, std::shared_ptr<RoundingError> error) {
  return std::make_shared<RoundedFloats>(leaf, std::move(error));
}

std::shared_ptr<Source> float32_source(std::shared_ptr<Floats> values) {
  return source_by([values = std::move(values)](uint64_t first, uint64_t count, void* out) {
    return values->read(first, count, static_cast<float*>(out));
  });
}

std::shared_ptr<Source> bfloat16_source(std::shared_ptr<Floats> values, StateReport* report) {
  if (report != nullptr) report->exact = false;
  std::vector<float> before, after;
  return source_by([values = std::move(values), errors = ErrorSum(report), before, after](
                       uint64_t first, uint64_t count, void* out) mutable -> Status {
    auto* to = static_cast<char*>(out);
    const ScratchBuffer memory(before, after);
    while (count > 0) {
      const uint64_t n = std::min(count, kFloatsPiece);
      before.resize(n), after.resize(n);
      RETURN_IF_ERROR(values->read(first, n, before.data()));
      for (uint64_t i = 0; i < n; ++i) {
        const uint16_t stored = bfloat16_nearest(before[i]);
        after[i] = bfloat16_to_float(stored);
        std::memcpy(to + 2 * i, &stored, 2);
      }
      errors.add(before.data(), after.data(), n);
      first += n, count -= n, to += 2 * n;
    }
    return fine();
  });
}

std::shared_ptr<Source> constant_source(std::string bytes, int width) {
  return source_by([bytes = std::move(bytes), width = static_cast<uint64_t>(width)](
                       uint64_t first, uint64_t count, void* out) {
    std::memcpy(out, bytes.data() + first * width, count * width);
    return fine();
  });
}

void ErrorSum::add(const float* before, const float* after, uint64_t count) {
  if (report_ == nullptr || count == 0) return;
  constexpr uint64_t kLanes = 16;  // sums of their own, so that they need not wait for each other
  float limit[kLanes] = {};
  double squares[kLanes] = {}, differences[kLanes] = {};
  const auto one = [&](uint64_t i, uint64_t lane) {
    const float d = std::fabs(before[i] - after[i]);
    limit[lane] = d > limit[lane] ? d : limit[lane];
    squares[lane] += static_cast<double>(before[i]) * before[i];
    differences[lane] += static_cast<double>(d) * d;
  };
  uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (uint64_t lane = 0; lane < kLanes; ++lane) one(i + lane, lane);
  }
  for (; i < count; ++i) one(i, 0);
  double all_squares = 0, all_differences = 0, largest = 0;
  for (uint64_t lane = 0; lane < kLanes; ++lane) {
    all_squares += squares[lane], all_differences += differences[lane];
    largest = std::max<double>(largest, limit[lane]);
  }
  if (!std::isfinite(all_squares) || !std::isfinite(all_differences)) {
    all_squares = all_differences = largest = 0;
    for (i = 0; i < count; ++i) {
      if (std::isfinite(before[i]) && std::isfinite(after[i])) {
        const double d = std::fabs(static_cast<double>(before[i]) - after[i]);
        largest = std::max(largest, d);
        all_squares += static_cast<double>(before[i]) * before[i];
        all_differences += d * d;
      } else if (!(before[i] == after[i]) && !(std::isnan(before[i]) && std::isnan(after[i]))) {
        largest = std::numeric_limits<double>::infinity();
      }
    }
  }
  static std::mutex mutex;  // parts of one state, which threads write, share its report
  const std::lock_guard lock(mutex);
  report_->squares += all_squares, report_->differences += all_differences;
  report_->max_error = std::max(report_->max_error, largest);
  report_->relative_error =
      report_->squares > 0 ? std::sqrt(report_->differences / report_->squares) : 0;
  if (std::isinf(report_->max_error)) report_->relative_error = report_->max_error;
}

}  // namespace lowbit::ckpt
