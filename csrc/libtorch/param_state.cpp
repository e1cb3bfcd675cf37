#include "libtorch/lowbit/param_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "catalog/catalog.h"
#include "catalog/coefficients.h"
#include "cpu/float_environment.h"
#include "cpu/step.h"
#include "policy/full_precision.h"
#include "policy/names.h"
#include "policy/presets.h"

namespace lowbit {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("lowbit: " + what);
}

/// Whether a step without measurements, rounding to the nearest, keeps a state so.
bool is_supported(const StateSpec& spec) {
  return !spec.factored() && (spec.scale == "none" || spec.scale == "block") &&
         spec.rounding == "nearest";
}

int64_t product(const std::vector<int64_t>& shape, size_t from) {
  int64_t n = 1;
  for (size_t d = from; d < shape.size(); ++d) n *= shape[d];
  return n;
}

int find_grad(const std::string& dtype) {
  for (int i = 0; i < grad_count(); ++i) {
    if (dtype == grad_dtype(i)) return i;
  }
  refuse("a gradient is " + dtype + ", which lowbit does not support");
}

}  // namespace

ParamState::ParamState(const std::string& rule, const std::vector<int64_t>& shape,
                       const std::string& dtype, const StateOptions& options)
    : rule_(find_rule(rule)), param_format_(-1) {
  if (rule_ < 0) refuse("no update rule is named '" + rule + "'");
  const RuleInfo info = rule_info(rule_);
  if (info.rounds > 0 || info.factors > 0 || info.numbers > 0)
    refuse(rule + " measures something before it updates; use it from Python");
  rows_ = shape.empty() ? 1 : shape[0];
  cols_ = shape.empty() ? 1 : product(shape, 1);
  numel_ = rows_ * cols_;
  const bool full_precision = options.full_precision || is_full_precision(shape);

  std::string stored = options.param_format;
  if (stored == "nearest" || (stored == "auto" && dtype == "float32")) stored = dtype;
  if (stored == "auto") stored = dtype + "_stochastic";
  param_format_ = find_param(stored);
  if (param_format_ < 0 || dtype != param_info(param_format_).dtype)
    refuse("a parameter is " + dtype + ", which param_format '" + options.param_format +
           "' does not store");
  const ParamInfo param = param_info(param_format_);
  if (param.compensation_dtype[0] != 0) {
    const size_t cut = stored.rfind("_stochastic");
    StateTensor compensation{"param_" + stored.substr(0, cut), param.compensation_dtype, shape};
    if (compensation.dtype == "uint8") compensation.shape.push_back(param.compensation_bytes);
    tensors_.push_back(compensation);
  }

  bool flat = true;
  for (int k = 0; k < info.slots; ++k) {
    const lowbit::Slot& slot = info.slot[k];
    std::optional<StateSpec> spec = state_spec(options.state_format, slot.is_signed);
    if (!spec || !is_supported(*spec))
      refuse("'" + options.state_format + "' is not a state format, or not one that C++ supports");
    if (slot.is_signed && !state_info(find_state(spec->format)).is_signed)
      refuse(std::string(slot.name) + " has negative values, which the unsigned format " +
             spec->format + " cannot hold");
    if (slot.is_slow) spec = slow_mean_spec(*spec, full_precision);
    if (full_precision && spec->coded()) spec = StateSpec{"float32"};
    const int format = find_state(spec->format);
    const StateInfo state = state_info(format);
    const std::string key =
        spec->format == "float32" ? slot.name : std::string(slot.name) + "_" + spec->format;
    slots_.push_back({format, static_cast<int>(spec->block), spec->rounding == "stochastic"});
    if (!state.scaled) {
      tensors_.push_back({key, state.dtype, shape});
      continue;
    }
    flat = false;
    tensors_.push_back({key, state.dtype, {rows_, code_bytes(cols_, state.bits)}});
    tensors_.push_back({key + "_scale",
                        state.scale_dtype,
                        {rows_, ceil_div(cols_, spec->block) * state.scale_numbers}});
  }
  if (flat) rows_ = 1, cols_ = numel_;  // one long row: nothing but the element index counts
}

bool ParamState::coded() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.block != 0; });
}

void ParamState::fresh(const std::vector<void*>& state) const {
  size_t at = param_info(param_format_).compensation_dtype[0] != 0 ? 1 : 0;
  const std::vector<float> zeros(kMaxTile, 0.0f);
  for (const Slot& slot : slots_) {
    if (slot.block == 0) {
      ++at;
      continue;
    }
    // The code of zero is not 0 in every format.
    const StateInfo info = state_info(slot.format);
    auto* codes = static_cast<char*>(state[at]);
    auto* scales = static_cast<char*>(state[at + 1]);
    const int64_t row_bytes = code_bytes(cols_, info.bits);
    const int64_t scale_bytes = ceil_div(cols_, slot.block) * info.scale_bytes;
    const int64_t tile = std::max(kTile, slot.block);
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t col = 0; col < cols_; col += tile) {
        const int n = static_cast<int>(std::min(tile, cols_ - col));
        cpu::quantize_run(cpu::kernels(), slot.format, zeros.data(),
                          codes + row * row_bytes + code_bytes(col, info.bits),
                          scales + row * scale_bytes + col / slot.block * info.scale_bytes,
                          slot.block, n);
      }
    }
    at += 2;
  }
}

void ParamState::step(const ParamStep& s, const RunParts& run) const {
  if (static_cast<int>(s.hyper.size()) != rule_info(rule_).hypers)
    refuse(std::string(rule_info(rule_).name) + " takes other hyperparameters");
  if (numel_ == 0) return;
  const cpu::FloatEnvironment environment;
  Job job{};
  job.rule = rule_;
  job.param = s.param, job.grad = s.grad;
  job.param_format = param_format_, job.grad_format = find_grad(s.grad_dtype);
  job.rows = rows_, job.cols = job.global_cols = cols_;
  job.numel = numel_;
  job.batches = job.inner_rows = job.inner_cols = 1;
  job.global_inner_rows = job.global_inner_cols = 1;
  job.tile = kTile;
  size_t at = 0;
  if (param_info(param_format_).compensation_dtype[0] != 0) job.compensation = s.state[at++];
  for (size_t k = 0; k < slots_.size(); ++k) {
    StateSlot& slot = job.state[k];
    slot.format = slots_[k].format, slot.block = slots_[k].block;
    slot.kind = slot.block > 0 ? kBlock : kNoScale;
    slot.stochastic = slots_[k].stochastic;
    slot.values = s.state[at++];
    if (slot.block > 0) slot.scales = s.state[at++];
    job.tile = std::max(job.tile, slot.block);
  }
  job.random = random_key(static_cast<uint64_t>(s.seed), static_cast<uint32_t>(s.step), s.stream);
  job.write_param = s.hyper[0] != 0.0;
  prepare(job, s.hyper.data(), s.step, s.maximize ? -1.0 : 1.0);
  cpu::lengthen_tiles(job);
  const cpu::Kernels& kernels = cpu::kernels();
  run(job.tiles(), [&](int64_t begin, int64_t end) {
    const cpu::FloatEnvironment environment;  // of that thread
    cpu::step(job, begin, end, kernels);
  });
}

std::string ParamState::foreign_moment(const std::string& key) const {
  const auto base = [](int rule) {
    const std::string name = rule_info(rule).name;
    return name.substr(0, name.find('_'));
  };
  std::string moment;
  bool kept = true;
  for (int rule = 0; rule < rule_count(); ++rule) {
    const RuleInfo info = rule_info(rule);
    const auto look = [&](const std::string& name) {
      if (key != name && key.rfind(name + '_', 0) != 0) return;
      if (name.size() > moment.size()) moment = name, kept = false;
      kept = kept || (name == moment && base(rule) == base(rule_));
    };
    for (int k = 0; k < info.slots; ++k) look(info.slot[k].name);
    for (int k = 0; k < info.factors; ++k) look(info.factor[k]);
  }
  return kept ? "" : moment;
}

void write_whole(const std::string& path, const void* data, size_t size) {
  const std::string temporary = path + ".part" + std::to_string(::getpid());
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool good = file >= 0;
  for (size_t done = 0; good && done < size;) {
    const ssize_t n = ::write(file, static_cast<const char*>(data) + done, size - done);
    good = n > 0 || (n < 0 && errno == EINTR);
    if (n > 0) done += static_cast<size_t>(n);
  }
  good = good && ::fsync(file) == 0;
  if (file >= 0) good = ::close(file) == 0 && good;
  if (good && ::rename(temporary.c_str(), path.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  throw std::runtime_error("lowbit: cannot write " + path + ": " + std::strerror(error));
}

}  // namespace lowbit
