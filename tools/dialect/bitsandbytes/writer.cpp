// Writing state as bitsandbytes keeps it: bytes where a parameter has 4096 elements, by its tables,
// in blocks of 256 of the flattened tensor.
#include <algorithm>
#include <set>

#include "dialect/bitsandbytes/bitsandbytes.h"
#include "dialect/common/other_libraries.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "dialect/tree/algorithm.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// What --state-format asks for.
enum class Keeping : uint8_t { kUnchanged, kQuantized, kFloat32 };

Result<Keeping> keeping_of(const Wanted& wanted) {
  const std::string& said = wanted.state_format;
  if (wanted.block != 0 && wanted.block != kBnbBlock && wanted.block != 2048)
    return usage("bitsandbytes has blocks of 256, and of 2048 before version 0.44; not of " +
                 std::to_string(wanted.block));
  if (said.empty()) return Keeping::kUnchanged;
  if (said == "8bit" || said == "dynamic8") return Keeping::kQuantized;
  if (said == "float32") return Keeping::kFloat32;
  return usage("bitsandbytes keeps state as 8bit or float32, not as " + printable(said));
}

bool is_float(const State& s) {
  return s.stored_as == "float32" || s.stored_as == "bfloat16" || s.stored_as == "float16" ||
         s.stored_as == "float64";
}

class BitsandbytesWriter {
 public:
  BitsandbytesWriter(const Model& model, const Wanted& wanted, Keeping keeping,
                     DialectReport& report)
      : model_(model),
        wanted_(wanted),
        keeping_(keeping),
        report_(report),
        own_(model.dialect == "bitsandbytes"),
        slots_(bnb_slots(model.algorithm)),
        block_(wanted.block == 0 ? kBnbBlock : wanted.block) {
    for (const bool is_signed : {true, false}) {
      const std::vector<float> map = codebook_of(is_signed ? "dynamic8" : "dynamic8_unsigned");
      maps_[is_signed] = held_floats(map);
      rules_[is_signed] = bitsandbytes_rule(map);
    }
  }

  Result<Document> write() {
    RETURN_IF_ERROR(refuse_subspace(model_, "bitsandbytes"));
    if (slots_.first.empty()) return no_optimizer(model_, "bitsandbytes");
    out_ = begun(model_);
    out_.leaves = model_.rest;
    for (const Param& p : model_.params) RETURN_IF_ERROR(param(p));
    RETURN_IF_ERROR(
        add_groups(model_, [&](const Group& group) { return settings_for(group); }, out_.leaves));
    return std::move(out_);
  }

 private:
  Status param(const Param& p) {
    if (p.states.empty()) return fine();  // bitsandbytes begins where a parameter has no entry
    std::set<std::string> known(slots_.first.begin(), slots_.first.end());
    if (!slots_.second.empty()) known.insert(slots_.second);
    for (const State& s : p.states) {
      if (known.contains(s.name)) continue;
      RETURN_IF_ERROR(leave_out(p, s, "bitsandbytes", wanted_, report_));
    }
    int64_t steps = 0;
    if (const Value* step = number_in(p, "step")) {
      ASSIGN_OR_RETURN(whole, whole_of(*step, shown(p) + ": step"));
      steps = whole;
    } else if (model_.algorithm == "sgd" || model_.algorithm == "lion") {
      steps = 1;  // bitsandbytes takes the first gradient for the buffer, torch's SGD counts none
    } else {
      return bad(shown(p) + ": has no step");
    }
    out_.leaves.push_back(value_leaf(state_path(model_, p, "step"), Value::number(steps)));
    std::vector<const State*> first;
    for (const std::string& name : slots_.first) {
      const State* s = find(p, name);
      if (s == nullptr) return bad(shown(p) + ": has no " + name);
      first.push_back(s);
    }
    RETURN_IF_ERROR(slot(p, 1, first));
    if (!slots_.second.empty()) {
      const State* s = find(p, slots_.second);
      if (s == nullptr) return bad(shown(p) + ": has no " + slots_.second);
      RETURN_IF_ERROR(slot(p, 2, {s}));
    }
    return fine();
  }

  static const State* find(const Param& p, const std::string& name) {
    for (const State& s : p.states) {
      if (s.name == name) return &s;
    }
    return nullptr;
  }

  Path at(const Param& p, const std::string& key) const {
    // A file of a version without the wrapper stays one.
    const bool plain =
        own_ && std::ranges::none_of(p.states, [](const State& s) {
          return !s.leaves.empty() && s.leaves[0]->name().find(kBnbWrapper) != std::string::npos;
        });
    return plain ? state_path(model_, p, key) : below(state_path(model_, p, kBnbWrapper), key);
  }

  /// Writes state1 or state2, which holds one state or several.
  Status slot(const Param& p, int number, const std::vector<const State*>& states) {
    for (const State* s : states) {
      if (s->values == nullptr) return lost_values(p, *s);
      if (s->shape != states[0]->shape)
        return bad(shown(p) + ": " + s->name + " has the shape " + shape_text(s->shape) +
                   ", another state " + shape_text(states[0]->shape));
      RETURN_IF_ERROR(check_shape(p, *s, report_));
    }
    const uint64_t n = volume(states[0]->shape);
    const bool floats = std::ranges::all_of(states, [](const State* s) { return is_float(*s); });
    const bool coded = own_ && has_blocks(*states[0], n, states.size());
    if (own_ && ((coded && keeping_ != Keeping::kFloat32 && !stays_full_precision(p, wanted_)) ||
                 (floats && keeping_ != Keeping::kQuantized))) {
      copy(p, states);
      return fine();
    }
    const bool full_precision = n < kBnbMin || keeping_ == Keeping::kFloat32 ||
                                stays_full_precision(p, wanted_) || (floats && wanted_.keep);
    if (full_precision) {
      put_float32(p, number, states);
      return fine();
    }
    return put_blocks(p, number, states);
  }

  /// The shape of a slot: several states in one slot have a dimension of their own, in front.
  static Shape slot_shape(Shape shape, size_t states) {
    if (states > 1) shape.insert(shape.begin(), static_cast<int64_t>(states));
    return shape;
  }

  void put_float32(const Param& p, int number, const std::vector<const State*>& states) {
    std::vector<Run> runs;
    for (const State* s : states) {
      report_of(report_, p, *s, "float32", true);
      runs.push_back({float32_source(s->values), volume(s->shape)});
    }
    out_.leaves.push_back(
        tensor_leaf(at(p, "state" + std::to_string(number)), find_dtype("float32"),
                    slot_shape(states[0]->shape, states.size()), joined(std::move(runs), 4)));
  }

  Status put_blocks(const Param& p, int number, const std::vector<const State*>& states) {
    const uint64_t n = volume(states[0]->shape);
    const bool is_signed = number == 1;
    const std::string format = is_signed ? "dynamic8" : "dynamic8_unsigned";
    const BlockLayout layout{.count = n, .block = block_};
    std::vector<Run> codes, scales;
    for (const State* s : states) {
      const auto flat = flat_codes(*s, format, block_);
      if (!flat && wanted_.keep)
        return mismatch(shown(p) + ", " + s->name + ": " + s->stored_as + " in the shape " +
                        shape_text(s->shape) + " cannot become bitsandbytes' blocks of " +
                        std::to_string(block_) + " without rounding; leave --keep out to allow it");
      StateReport* entry =
          report_of(report_, p, *s,
                    std::string("bitsandbytes 8-bit ") + (is_signed ? "signed" : "unsigned") +
                        ", blocks of " + std::to_string(block_),
                    flat.has_value());
      if (flat) {
        codes.push_back({flat->codes, n});
        scales.push_back({flat->scales, layout.blocks()});
      } else {
        const auto& values = s->values;
        codes.push_back({block_codes(rules_[is_signed], layout, values, entry), n});
        scales.push_back(
            {float32_source(block_scales(rules_[is_signed], layout, values, 0)), layout.blocks()});
      }
    }
    const std::string digit = std::to_string(number);
    const Dtype* float32 = find_dtype("float32");
    out_.leaves.push_back(tensor_leaf(at(p, "state" + digit), find_dtype("uint8"),
                                      slot_shape(states[0]->shape, states.size()),
                                      joined(std::move(codes), 1)));
    out_.leaves.push_back(tensor_leaf(at(p, "qmap" + digit), float32, {256}, maps_[is_signed]));
    out_.leaves.push_back(
        tensor_leaf(at(p, "absmax" + digit), float32,
                    slot_shape({static_cast<int64_t>(layout.blocks())}, states.size()),
                    joined(std::move(scales), 4)));
    return fine();
  }

  /// Whether bitsandbytes' own leaves have the blocks that are wanted, by whatever table.
  bool has_blocks(const State& s, uint64_t n, size_t parts) const {
    return std::ranges::any_of(s.leaves, [&](const Leaf* leaf) {
      return leaf->path.back().text().starts_with("absmax") &&
             volume(leaf->shape) == BlockLayout{.count = n, .block = block_}.blocks() * parts;
    });
  }

  /// Leaves of the source as they are.
  void copy(const Param& p, const std::vector<const State*>& states) {
    for (const State* s : states) report_of(report_, p, *s, s->stored_as, true);
    for (const Leaf* leaf : states[0]->leaves) {
      Leaf same = *leaf;
      same.path = at(p, leaf->path.back().text());
      out_.leaves.push_back(std::move(same));
    }
  }

  Settings settings_for(const Group& group) {
    const std::string& kind = model_.algorithm;
    const Value none = Value::none();
    const auto number = [&](const char* name, double otherwise) {
      const auto said = real_setting(group, name);
      return Value::floating(said ? *said : otherwise);
    };
    Settings table = {{"lr", Value::floating(kind == "lion" ? 1e-4 : 1e-3)},
                      {"betas", Value::tuple({Value::floating(0.9), Value::floating(0.999)})},
                      {"eps", Value::floating(1e-8)},
                      {"weight_decay", Value::number(0)}};
    Group said = group;
    if (kind == "adam" || kind == "ademamix") {
      set_in(table, "alpha", Value::floating(kind == "adam" ? 0.0 : 5.0));
      set_in(table, "t_alpha", none);
      set_in(table, "t_beta3", none);
    }
    if (!own_) {
      const auto pair = [&](Value a, Value b) {
        set_in(said.settings, "betas", Value::tuple({std::move(a), std::move(b)}));
      };
      if (kind == "sgd") {
        pair(number("momentum", 0.9), Value::number(0));  // it has no use for a dampening
        set_in(said.settings, "eps", Value::floating(0));
      } else if (kind == "rmsprop") {
        pair(number("alpha", 0.99), Value::number(0));
      } else if (kind == "adagrad") {
        pair(Value::floating(0), Value::floating(0));
      } else if (kind == "lion") {
        set_in(said.settings, "eps", Value::floating(0));
      }
    }
    return settings_of(said, table);
  }

  const Model& model_;
  const Wanted& wanted_;
  const Keeping keeping_;
  DialectReport& report_;
  const bool own_;
  const BnbSlots slots_;
  const int64_t block_;
  std::shared_ptr<Source> maps_[2];
  std::shared_ptr<const BlockRule> rules_[2];
  Document out_;
};

}  // namespace

Result<Document> write_bitsandbytes(const Model& model, const Wanted& wanted,
                                    DialectReport& report) {
  ASSIGN_OR_RETURN(keeping, keeping_of(wanted));
  if (model.flattened) return bad("bitsandbytes loads no flattened state");
  return BitsandbytesWriter(model, wanted, keeping, report).write();
}

}  // namespace lowbit::ckpt
