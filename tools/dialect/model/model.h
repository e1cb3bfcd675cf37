// What an optimizer checkpoint means, whoever wrote it: parameters, their state as numbers, groups
// and settings. Dialects translate between this and a document's leaves.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "container/document/document.h"

namespace lowbit::ckpt {

/// The numbers of a state, dequantized: element i of the parameter's row-major order. Rules as for
/// Source.
class Floats {
 public:
  virtual ~Floats() = default;
  Status read(uint64_t first, uint64_t count, float* out) {
    const std::lock_guard lock(mutex_);
    return do_read(first, count, out);
  }
  /// The same without rounding, where a file has float64.
  Status read_doubles(uint64_t first, uint64_t count, double* out) {
    const std::lock_guard lock(mutex_);
    return do_read_doubles(first, count, out);
  }

 protected:
  virtual Status do_read_doubles(uint64_t first, uint64_t count, double* out);

 private:
  virtual Status do_read(uint64_t first, uint64_t count, float* out) = 0;
  std::mutex mutex_;
};
/// Numbers that are read by a function, which owns what it captures.
template <class Read>
std::shared_ptr<Floats> floats_by(Read read) {
  return reading_by<Floats, float>(std::move(read));
}

/// State in the terms of lowbit's own formats, bit for bit: what another dialect can relabel
/// without dequantizing. Codes are [rows, ceil(cols * bits / 8)], bit streams by row, scales
/// [rows, ceil(cols / block)] (docs/definitions/formats.md).
struct Codes {
  std::string format;  // of lowbit's catalog: "dynamic8", "dynamic8_unsigned", ...
  int bits = 8;
  int64_t rows = 1, cols = 1, block = 256;
  std::shared_ptr<Source> codes;   // bytes
  std::shared_ptr<Source> scales;  // the format's scale dtype
};

/// The values of a name, such as settings of a group.
using Settings = std::vector<std::pair<std::string, Value>>;
/// The value of a name; null where there is none.
const Value* setting(const Settings& settings, std::string_view name);

/// One state of one parameter.
struct State {
  std::string name;  // torch's: exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer, ...; of a
                     // factored second moment <name>_row and <name>_col, with their own shape
  Shape shape;       // the parameter's, where the file says it
  bool is_signed = true;
  std::string stored_as;  // for people: "float32", "bitsandbytes dynamic 8-bit, blocks of 256"
  uint64_t bytes = 0;     // in the file
  std::shared_ptr<Floats> values;
  std::optional<Codes> codes = {};
  bool rescaled = false;  // the values are not the numbers of `leaves`, but these times a factor
  std::vector<const Leaf*> leaves = {};  // of the document that hold it, for health and messages
  // What is kept beside a 16-bit weight (docs/definitions/formats.md) has no `values`: its name is
  // lowbit's key, param_bfloat16_split8, and what lowbit keeps under it is this, or leaves[0].
  std::optional<Leaf> raw = {};
  /// The state's tensors under lowbit's own keys ("exp_avg_dynamic8", "exp_avg_dynamic8_scale"),
  /// where the file holds exactly these: lowbit takes them over bit for bit.
  std::vector<std::pair<std::string, Leaf>> own = {};
};

struct Param {
  std::string name;    // the fqn; "" where the checkpoint only numbers its parameters
  int64_t index = -1;  // in the order of the groups; -1 where it only has names
  Shape shape;         // {} with known_shape false where no leaf tells it
  bool known_shape = false;
  void learn(Shape told) { shape = std::move(told), known_shape = true; }
  std::vector<State> states;
  Settings numbers;  // step, ...: plain numbers, whatever they were
};

struct Group {
  Settings settings;           // without "params"
  std::vector<size_t> params;  // places in Model::params
  /// Settings that the file keeps as tensors of one element, by their paths in the group: {"lr"},
  /// {"betas", 0}. `settings` has their values.
  std::vector<std::pair<Path, const Leaf*>> tensors = {};
  /// Settings that are tensors of more elements: no optimizer here has such, and `diff` compares
  /// them. In a flattened state dict the path begins with the parameter's name.
  std::vector<std::pair<Path, const Leaf*>> arrays = {};
};

struct Model {
  std::string dialect;     // that it was read as
  std::string algorithm;   // "adam", "sgd", "adafactor", "lion", ...; by the names of the states
  Path root;               // where the optimizer's state dict lies: {}, {"optim"}, {"optimizer"}
  bool flattened = false;  // one leaf of settings for each parameter (torch's
                           // flatten_optimizer_state_dict)
  std::vector<Param> params;
  std::vector<Group> groups;
  std::vector<Leaf> rest;            // everything else (weights, counters), passed through
  std::vector<const Leaf*> weights;  // in document->model, of params that its order names
  std::vector<std::string> warnings;
  /// Sentences on what cannot be known or kept: `convert` asks for --lossy.
  std::vector<std::string> unresolved = {};
  std::string refusal = {};   // why no optimizer here continues from it; empty where one does
  std::string only_for = {};  // the one dialect whose optimizer continues from it; empty: any
  std::shared_ptr<const Document> document;   // that it was read from
  std::shared_ptr<const Document> view = {};  // has the leaves of states that are rearranged
};

}  // namespace lowbit::ckpt
