// Writing state as torchao's optimizers keep it: tensor subclasses where a parameter has 4096
// elements and is a multiple of a block, plain float32 tensors elsewhere.
#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/numbers/adapters.h"
#include "dialect/requantize/nearest.h"
#include "dialect/torchao/leaf.h"
#include "dialect/torchao/torchao.h"
#include "dialect/tree/algorithm.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The kind whose formats these are; null where there is none.
const TorchaoKind* kind_of_format(const std::string& format) {
  for (const TorchaoKind& kind : kTorchaoKinds) {
    if (format == kind.with_sign || format == kind.without) return &kind;
  }
  return nullptr;
}

/// Whether torchao keeps this state as codes of that kind. Where its file had plain floats, as of a
/// parameter that is no multiple of a block, other libraries have codes of their own choice.
bool speaks_for(const TorchaoKind& kind, const State& s, bool own) {
  if (!s.codes || kind_of_format(s.codes->format) != &kind) return false;
  const uint64_t n = volume(s.shape);
  const auto block = static_cast<uint64_t>(std::min(kind.block, s.codes->block));
  return own || (n >= kTorchaoMin && n % block == 0);
}

/// What --state-format asks for. Null: floats.
Result<const TorchaoKind*> kind_of(const Model& model, const std::string& said) {
  if (said.empty()) {
    // The kind that most of the codes are of already.
    const TorchaoKind* best = nullptr;
    size_t limit = 0;
    for (const TorchaoKind& kind : kTorchaoKinds) {
      size_t n = 0;
      for (const Param& p : model.params) {
        for (const State& s : p.states)
          n += speaks_for(kind, s, model.dialect == "torchao") ? 1 : 0;
      }
      if (n > limit) best = &kind, limit = n;
    }
    return best != nullptr ? best : &kTorchaoKinds[0];
  }
  if (said == "8bit") return &kTorchaoKinds[0];
  if (said == "4bit") return &kTorchaoKinds[1];
  if (said == "fp8") return &kTorchaoKinds[2];
  if (said == "float32") return nullptr;
  if (const TorchaoKind* kind = kind_of_format(said)) return kind;
  return usage("torchao keeps state as 8bit, 4bit, fp8 or float32, not as " + printable(said));
}

class TorchaoWriter {
 public:
  TorchaoWriter(const Model& model, const Wanted& wanted, const TorchaoKind* kind,
                DialectReport& report)
      : model_(model), wanted_(wanted), kind_(kind), report_(report) {}

  Result<Document> write() {
    RETURN_IF_ERROR(refuse_subspace(model_, "torchao"));
    if (model_.algorithm != "adam")
      return bad("torchao has Adam and AdamW only, and these are states of " +
                 (model_.algorithm.empty() ? "an optimizer that is not known"
                                           : printable(model_.algorithm)));
    out_ = begun(model_);
    out_.leaves = model_.rest;
    for (const Param& p : model_.params) RETURN_IF_ERROR(param(p));
    RETURN_IF_ERROR(groups());
    return std::move(out_);
  }

 private:
  Status param(const Param& p) {
    if (p.states.empty() && p.numbers.empty()) return fine();  // it was never stepped
    const Value* step = number_in(p, "step");
    if (step == nullptr) return bad(shown(p) + ": has no step");
    ASSIGN_OR_RETURN(real, real_of(*step, shown(p) + ": step"));
    out_.leaves.push_back(scalar_leaf(state_path(model_, p, "step"), static_cast<float>(real)));
    for (const State& s : p.states) {
      const bool known =
          s.name == "exp_avg" || s.name == "exp_avg_sq" || s.name == "max_exp_avg_sq";
      if (!known) {
        RETURN_IF_ERROR(leave_out(p, s, "torchao", wanted_, report_));
        continue;
      }
      if (s.values == nullptr) return lost_values(p, s);
      RETURN_IF_ERROR(check_shape(p, s, report_));
      RETURN_IF_ERROR(state(p, s));
    }
    return fine();
  }

  Status state(const Param& p, const State& s) {
    const bool own = model_.dialect == "torchao" && s.leaves.size() == 1;
    const bool wide = kind_ == nullptr || stays_full_precision(p, wanted_);
    const uint64_t n = volume(s.shape);
    const bool is_signed = s.is_signed;
    const auto flat =
        wide ? std::nullopt
             : flat_codes(s, is_signed ? kind_->with_sign : kind_->without, wanted_.block);
    const int64_t block = flat                 ? flat->block
                          : wanted_.block != 0 ? wanted_.block
                          : wide               ? 1
                                               : kind_->block;
    const bool fits = !wide && n >= kTorchaoMin && n % static_cast<uint64_t>(block) == 0;
    // As it is: of the kind that is wanted, by whatever table, or plain and to stay so.
    if (own && s.leaves[0]->kind == Leaf::Kind::kSubclass && !wide &&
        torchao_kind(s.leaves[0]->cls) == kind_ &&
        (wanted_.block == 0 || block_of(*s.leaves[0]) == wanted_.block)) {
      report_of(report_, p, s, s.stored_as, true);
      Leaf same = *s.leaves[0];
      same.path = state_path(model_, p, s.name);
      same.cls = std::string(kind_->module) + "." + kind_->cls;
      out_.leaves.push_back(std::move(same));
      return fine();
    }
    if (!fits || (wanted_.keep && !flat && s.stored_as == "float32")) {
      report_of(report_, p, s, "float32", true);
      out_.leaves.push_back(float32_leaf(state_path(model_, p, s.name), s, s.shape));
      return fine();
    }
    if (!flat && wanted_.keep)
      return mismatch(shown(p) + ", " + s.name + ": " + s.stored_as + " in the shape " +
                      shape_text(s.shape) + " cannot become torchao's " + kind_->name +
                      " blocks of " + std::to_string(block) +
                      " without rounding; leave --keep out to allow it");
    StateReport* entry =
        report_of(report_, p, s,
                  std::string("torchao ") + kind_->name + ", blocks of " + std::to_string(block),
                  flat.has_value());
    // torchao takes the dtype of the parameter for it when it loads.
    const Dtype* dtype = find_dtype("float32");
    Leaf leaf;
    if (flat) {
      auto codes = kind_->bits == 4 ? swapped_nibbles(flat->codes) : flat->codes;
      leaf = torchao_leaf(*kind_, dtype, s.shape, is_signed, block, std::move(codes), flat->scales);
    } else {
      leaf = torchao_coded(*kind_, dtype, s.shape, is_signed, block, s.values, entry);
    }
    leaf.path = state_path(model_, p, s.name);
    leaf.recut = torchao_recut(*kind_, leaf, is_signed, block, s.values, entry, flat.has_value());
    out_.leaves.push_back(std::move(leaf));
    return fine();
  }

  static int64_t block_of(const Leaf& subclass) {
    for (const Leaf& part : subclass.parts) {
      if (part.name() == "scale" && volume(part.shape) > 0)
        return static_cast<int64_t>(volume(subclass.shape) / volume(part.shape));
    }
    return 0;
  }

  Status groups() {
    const Settings table = {{"lr", Value::floating(1e-3)},
                            {"betas", Value::tuple({Value::floating(0.9), Value::floating(0.999)})},
                            {"eps", Value::floating(1e-8)},
                            {"weight_decay", Value::number(0)},
                            {"amsgrad", Value::boolean(false)}};
    const size_t first = out_.leaves.size();
    RETURN_IF_ERROR(add_groups(
        model_, [&](const Group& group) { return settings_of(group, table); }, out_.leaves));
    // torchao refuses a learning rate that is not a tensor.
    for (size_t i = first; i < out_.leaves.size(); ++i) {
      Leaf& leaf = out_.leaves[i];
      const std::string last = leaf.path.back().text();
      if (leaf.kind != Leaf::Kind::kValue || (last != "lr" && !last.ends_with(".lr"))) continue;
      const auto lr = real_of(leaf.value, last);
      if (lr.ok()) leaf = scalar_leaf(leaf.path, static_cast<float>(lr.value()));
    }
    return fine();
  }

  const Model& model_;
  const Wanted& wanted_;
  const TorchaoKind* const kind_;
  DialectReport& report_;
  Document out_;
};

}  // namespace

Result<Document> write_torchao(const Model& model, const Wanted& wanted, DialectReport& report) {
  if (wanted.block < 0 || wanted.block % 2 != 0)
    return usage("torchao's blocks have an even number of values, not " +
                 std::to_string(wanted.block));
  ASSIGN_OR_RETURN(kind, kind_of(model, wanted.state_format));
  return TorchaoWriter(model, wanted, kind, report).write();
}

}  // namespace lowbit::ckpt
