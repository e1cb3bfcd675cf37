// Reading lowbit's state (docs/definitions/formats.md).
#include "dialect/lowbit/lowbit.h"

#include <algorithm>

#include "core/layout.h"
#include "dialect/common/other_libraries.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/dequantize.h"
#include "dialect/tree/weights.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<int> recognize_lowbit(const Document& /*document*/, const OptimizerTree& tree) {
  for (const Group& group : tree.groups) {
    if (setting(group, "lowbit_version") != nullptr) return 3;
  }
  std::string state, format;
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (split_key(name, state, format)) return 3;
    }
  }
  return 0;
}

/// A version of its settings that this program does not know may mean anything.
Status check_version(const OptimizerTree& tree) {
  for (size_t g = 0; g < tree.groups.size(); ++g) {
    const Value* said = setting(tree.groups[g], "lowbit_version");
    if (said == nullptr || (said->is(Value::Kind::kInt) && said->integer == 1)) continue;
    return bad("param_groups." + std::to_string(g) + ": has lowbit_version " +
               (said->is(Value::Kind::kInt) ? std::to_string(said->integer) : "of another kind") +
               ", and this program reads 1; read it with the lowbit-ckpt of the lowbit that wrote "
               "it");
  }
  return fine();
}

/// Reads the states of one parameter from its leaves.
class LowbitReader {
 public:
  LowbitReader(const Entry& entry, const Group& group, const Leaf* weight, Param& out)
      : entry_(entry),
        rank_(setting(group, "rank")),
        low_rank_(rank_ != nullptr && !rank_->is(Value::Kind::kNone)),
        weight_(weight),
        out_(out) {}

  Status run() {
    RETURN_IF_ERROR(learn_shape());
    for (const auto& [name, leaf] : entry_.leaves) {
      if (name == "shape") continue;
      std::string state, format;
      if (leaf->kind == Leaf::Kind::kValue) {
        if (!leaf->value.is(Value::Kind::kNone)) out_.numbers.emplace_back(name, leaf->value);
      } else if (leaf->kind != Leaf::Kind::kTensor || leaf->source == nullptr) {
        return bad(printable(leaf->name()) + ": is not a plain tensor, as lowbit's are");
      } else if (split_key(name, state, format)) {
        RETURN_IF_ERROR(coded(state, *find_format(format), *leaf));
      } else if (name.find("_scale") != std::string::npos && scale_of_known(name)) {
        // Taken with its codes.
        if (const std::string key = name.substr(0, name.rfind("_scale"));
            entry_.find(key) == nullptr)
          return bad(printable(leaf->name()) + ": has no codes: " + key + " is missing");
      } else if (!is_moment(name) && !name.starts_with("param_") && leaf->shape.empty()) {
        ASSIGN_OR_RETURN(number, number_of(*leaf));
        out_.numbers.emplace_back(name, std::move(number));
      } else {
        add(name, *leaf, leaf->shape);
        const std::string_view dtype = leaf->dtype->name;
        // The compensation of a weight is not a state by itself.
        if (!name.starts_with("param_") && (dtype == "float32" || dtype == "bfloat16"))
          out_.states.back().values = floats_of(*leaf);
      }
    }
    mark_subspace();
    return fine();
  }

 private:
  /// Says of what is stepped in a subspace that it is (refuse_subspace): it has a limiter's norm,
  /// and matrices with the rank for a side that are not of the weight's shape, or codes of another.
  void mark_subspace() {
    if (!low_rank_ || number_in(out_, "update_norm") == nullptr) return;
    const bool any = std::ranges::any_of(out_.states, [&](const State& s) {
      if (weight_ != nullptr && s.shape == weight_->shape) return false;
      return s.shape.size() == 2 && is_moment(s.name) &&
             (!rank_->is(Value::Kind::kInt) || s.shape[0] == rank_->integer ||
              s.shape[1] == rank_->integer);
    });
    if (any || number_in(out_, "shape") != nullptr)
      out_.numbers.emplace_back("apollo_rank", *rank_);
  }
  static bool scale_of_known(const std::string& name) {
    std::string state, format;
    return split_key(name.substr(0, name.rfind("_scale")), state, format);
  }

  /// A coded state's tensors: the codes under that key, and their scales of any kind.
  std::vector<std::pair<std::string, Leaf>> tensors_of(const std::string& key) const {
    std::vector<std::pair<std::string, Leaf>> out;
    for (const auto& [name, leaf] : entry_.leaves) {
      if (leaf->kind == Leaf::Kind::kTensor && (name == key || name.starts_with(key + "_scale")))
        out.emplace_back(name, *leaf);
    }
    return out;
  }

  State& add(const std::string& name, const Leaf& leaf, const Shape& shape) {
    State s;
    s.name = name;
    s.shape = shape;
    s.is_signed = is_signed_state(name);
    s.stored_as = leaf.dtype->name;
    s.bytes = leaf.bytes();
    s.leaves = {&leaf};
    s.own = {{name, leaf}};
    out_.states.push_back(std::move(s));
    return out_.states.back();
  }

  /// The shape that is stored beside codes; empty if there is none.
  Result<std::optional<Shape>> told() const {
    const Leaf* leaf = entry_.find("shape");
    if (leaf == nullptr || leaf->kind != Leaf::Kind::kTensor) return std::optional<Shape>();
    const auto refused = [&](const char* what) {
      return bad(printable(leaf->name()) + ": " + what);
    };
    if (std::string_view(leaf->dtype->name) != "int64" || leaf->shape.size() != 1 ||
        leaf->shape[0] > 64 || leaf->source == nullptr)
      return refused("is not a shape, which is a row of at most 64 int64 numbers");
    Shape shape(static_cast<size_t>(leaf->shape[0]));
    RETURN_IF_ERROR(leaf->source->read(0, shape.size(), shape.data()));
    int64_t all = 1;
    for (const int64_t size : shape) {
      if (size < 0 || __builtin_mul_overflow(all, std::max<int64_t>(size, 1), &all))
        return refused("is not a shape that a tensor can have");
    }
    return std::optional(std::move(shape));
  }

  /// From a full-precision state, factors, what is told, the weight; else only the matrix is known,
  /// where codes are bytes. The codes of low-rank states are of another matrix.
  Status learn_shape() {
    const Leaf *row = nullptr, *col = nullptr, *codes = nullptr;
    int bits = 0;
    for (const auto& [name, leaf] : entry_.leaves) {
      std::string state, format;
      if (leaf->kind != Leaf::Kind::kTensor) continue;
      if (is_moment(name)) return learned(leaf->shape);
      if (split_key(name, state, format)) {
        const FormatInfo& info = *find_format(format);
        if (!info.scaled) return learned(leaf->shape);
        if (info.bits > bits) codes = leaf, bits = info.bits;
      }
      if (name.ends_with("_row")) row = leaf;
      if (name.ends_with("_col")) col = leaf;
    }
    if (row != nullptr && col != nullptr && !row->shape.empty() && !col->shape.empty())
      return learned(shape_of_means(row->shape, col->shape));
    if (codes != nullptr && codes->shape.size() != 2)
      return bad(printable(codes->name()) + ": codes have shape " + shape_text(codes->shape) +
                 "; they must be a matrix");
    const auto fits = [&](const Shape& shape) {
      const auto [rows, cols] = matrix_of(shape);
      return codes == nullptr ||
             (rows == codes->shape[0] && code_bytes(cols, bits) == codes->shape[1]);
    };
    ASSIGN_OR_RETURN(said, told());
    if (said && fits(*said)) return learned(*said);
    if (said && !low_rank_)
      return bad(printable(entry_.find("shape")->name()) + ": says " + shape_text(*said) +
                 ", which contradicts the codes of " + printable(codes->name()) + ", " +
                 shape_text(codes->shape));
    if (said) {
      Value sizes = Value::tuple({});
      for (const int64_t size : *said) sizes.items.push_back(Value::number(size));
      out_.numbers.emplace_back("shape", std::move(sizes));
    }
    if (weight_ != nullptr && fits(weight_->shape)) return learned(weight_->shape);
    if (codes != nullptr && bits >= 8) out_.shape = {codes->shape[0], codes->shape[1] * 8 / bits};
    return fine();
  }
  Status learned(const Shape& shape) {
    out_.learn(shape);
    return fine();
  }

  Status coded(const std::string& name, const FormatInfo& info, const Leaf& leaf) {
    const std::string what = printable(leaf.name());
    State& s = add(name, leaf, out_.shape);
    s.stored_as = info.name;
    s.own = tensors_of(name + "_" + info.name);
    if (leaf.dtype != info.dtype)
      return bad(what + ": is " + leaf.dtype->name + ", not " + info.dtype->name +
                 ": the values were cast by the program that wrote them and cannot be recovered");
    if (!info.scaled) {
      s.values = floats_of(leaf);
      return fine();
    }
    if (out_.shape.empty()) {
      s.stored_as += ", of a shape that the file does not tell (--model PATH gives it)";
      return fine();
    }
    const auto [rows, cols] = matrix_of(out_.shape);
    if (leaf.shape != Shape{rows, code_bytes(cols, info.bits)})
      return bad(what + ": codes have shape " + shape_text(leaf.shape) + ", which does not fit a " +
                 "parameter of shape " + shape_text(out_.shape));
    const std::string base = name + "_" + info.name + "_scale";
    Codes codes{info.name, info.bits, rows, cols, 0, leaf.source, nullptr};
    if (const Leaf* scale = entry_.find(base)) {
      if (scale->kind != Leaf::Kind::kTensor || scale->dtype != info.scale_dtype ||
          scale->shape.size() != 2 || scale->shape[0] != rows || scale->source == nullptr)
        return bad(printable(scale->name()) + ": is not a " + info.scale_dtype->name +
                   " matrix of " + std::to_string(rows) + " rows, as scales of blocks are");
      const auto fits = [&](int block) {
        return info.scale_numbers * ceil_div(cols, block) == scale->shape[1];
      };
      if (fits(info.block)) codes.block = info.block;
      for (int block = kMinBlock; codes.block == 0 && block <= kMaxBlock; block *= 2) {
        if (fits(block)) codes.block = block;
      }
      if (codes.block == 0)
        return bad(printable(scale->name()) + ": has " + std::to_string(scale->shape[1]) +
                   " columns, which fits blocks of no length for " + std::to_string(cols) +
                   " columns of codes");
      codes.scales = scale->source;
      s.stored_as += ", blocks of " + std::to_string(codes.block);
      s.bytes += scale->bytes();
      s.leaves.push_back(scale);
      s.values = dequantized(codes);
      s.codes = std::move(codes);
      return fine();
    }
    return given(base, info, codes, s);
  }

  /// Codes with cross-tile scales.
  Status given(const std::string& base, const FormatInfo& info, const Codes& codes, State& s) {
    std::vector<CrossTileScale> maxima;
    const auto take = [&](const std::string& end, int dim, int64_t n) -> Status {
      const Leaf* leaf = entry_.find(base + "_" + end);
      if (leaf == nullptr) return fine();
      if (leaf->kind != Leaf::Kind::kTensor || leaf->shape != Shape{n} ||
          std::string_view(leaf->dtype->name) != "float32" || leaf->source == nullptr)
        return bad(printable(leaf->name()) + ": is not a float32 tensor of " + std::to_string(n) +
                   " scales");
      maxima.push_back({dim, leaf->source});
      s.bytes += leaf->bytes();
      s.leaves.push_back(leaf);
      return fine();
    };
    RETURN_IF_ERROR(take("row", 0, codes.rows));
    RETURN_IF_ERROR(take("column", CrossTileScale::kColumns, codes.cols));
    RETURN_IF_ERROR(take("tensor", CrossTileScale::kWhole, 1));
    if (maxima.empty()) {
      for (size_t d = 0; d < out_.shape.size(); ++d)
        RETURN_IF_ERROR(take("rank1_" + std::to_string(d), static_cast<int>(d), out_.shape[d]));
      if (maxima.size() != out_.shape.size() || maxima.empty())
        return bad(shown(out_) + ": " + base + " is missing" +
                   (out_.known_shape ? "" : ", or is of dimensions that --model PATH would tell"));
    }
    if (!info.cross_tile)
      return bad(shown(out_) + ": " + info.name + " cannot have a scale of more than a block");
    s.stored_as += ", a scale for each row, column or dimension";
    s.values = dequantized_cross_tile(codes, out_.shape, std::move(maxima));
    return fine();
  }

  const Entry& entry_;
  const Value* rank_;  // of the group; None where an Adafactor has none
  const bool low_rank_;
  const Leaf* weight_;
  Param& out_;
};

}  // namespace

bool split_key(const std::string& key, std::string& state, std::string& format) {
  for (size_t at = key.find('_'); at != std::string::npos; at = key.find('_', at + 1)) {
    if (!is_moment(key.substr(0, at)) || find_format(key.substr(at + 1)) == nullptr) continue;
    state = key.substr(0, at);
    format = key.substr(at + 1);
    return true;
  }
  return false;
}

Result<Model> read_lowbit(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  RETURN_IF_ERROR(check_version(tree));
  Model out = model_of(tree, "lowbit", document);
  const Weights weights(*document, tree);
  const std::vector<const Group*> group_of = groups_by_param(out);
  for (size_t i = 0; i < out.params.size(); ++i) {
    const Entry& entry = tree.params[i];
    // Most of lowbit's states tell their shape: several weights that differ are not an error yet.
    const auto weight = weights.find(entry.name, Weights::Asked::kShape);
    const Leaf* known = weight.ok() ? weight.value() : nullptr;
    RETURN_IF_ERROR(LowbitReader(entry, *group_of[i], known, out.params[i]).run());
  }
  out.algorithm = algorithm_of(out);
  return out;
}

// As decay_by.
constexpr KeptSetting kKeptByLowbit[] = {{"", "scale_weight_decay"}};

extern const Dialect kLowbitDialect = {
    "lowbit",
    "lowbit's optimizers, in any of its formats (--state-format)",
    recognize_lowbit,
    read_lowbit,
    write_lowbit,
    kKeptByLowbit,
    {.always_decoupled = true, .decoupled_beside_muon = true}};

}  // namespace lowbit::ckpt
