// One parameter and its state where nothing is sharded, for programs without Python: what
// lowbit/state/layout.py decides, and the step. Knows no torch, and is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lowbit {

/// How state is stored; names as in Python.
struct StateOptions {
  std::string state_format = "8bit";  // a preset whose scales are of blocks, or a format
  std::string param_format = "auto";  // stochastic rounding for 16-bit parameters
  bool full_precision = false;        // float32 state whatever the shape
};

/// One tensor of the state.
struct StateTensor {
  std::string key, dtype;
  std::vector<int64_t> shape;
};

/// What a step takes of one parameter; everything is contiguous.
struct ParamStep {
  void* param;
  const void* grad;
  std::string grad_dtype;
  std::vector<void*> state;   // in the order of ParamState::tensors()
  std::vector<double> hyper;  // as the catalog lists them for the rule
  int64_t step;               // counted from 1
  uint32_t stream;            // of random bits
  int64_t seed;
  bool maximize;
};

/// Calls the function given for ranges that together are [0, n), on any threads.
using RunParts = std::function<void(int64_t n, const std::function<void(int64_t, int64_t)>&)>;

class ParamState {
 public:
  /// Throws std::invalid_argument where there is no such rule, format or dtype, or where they do
  /// not go together.
  ParamState(const std::string& rule, const std::vector<int64_t>& shape, const std::string& dtype,
             const StateOptions& options);

  const std::vector<StateTensor>& tensors() const { return tensors_; }
  /// Whether some state is coded, as a matrix that does not tell the parameter's shape.
  bool coded() const;
  /// Fills the tensors, zeroed and in the order of tensors(), with the state before the first step.
  void fresh(const std::vector<void*>& state) const;
  void step(const ParamStep& step, const RunParts& run) const;
  /// The moment that a key of saved state belongs to, if neither the rule nor a variant of it, such
  /// as AMSGrad, keeps that: the state is another optimizer's. Else "".
  std::string foreign_moment(const std::string& key) const;

 private:
  struct Slot {
    int format, block;  // block: 0 where values have no scales
    bool stochastic;
  };
  int rule_, param_format_;
  int64_t rows_, cols_, numel_;
  std::vector<Slot> slots_;
  std::vector<StateTensor> tensors_;
};

/// A parameter's name without what wrappers put into it, such as "module." (csrc/policy/names.h).
std::string clean_name(const std::string& name);

/// The stream of random bits of a parameter: of its clean name.
uint32_t stream_of(const std::string& name);

/// Writes a file that appears whole or not at all. Throws std::runtime_error.
void write_whole(const std::string& path, const void* data, size_t size);

}  // namespace lowbit
