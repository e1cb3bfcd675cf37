// Reading the low-rank state of adafactor-8bit 0.1.9 (apollo_rank), which lowbit.Adafactor steps
// with a rank and projection="torch" (docs/definitions/lowrank.md).
//
// v_low is the flattened second moment of the gradient in a subspace, scaled_grad_norm_prev the
// norm that its limiter left. The projection is drawn from current_proj_seed by torch's generator
// of the device. So the state is taken only where lowbit draws the same projection: on a CPU, from
// seeds that count the parameters from 0.
#include <cfloat>
#include <random>

#include "dialect/adafactor8bit/adafactor8bit.h"
#include "dialect/numbers/adapters.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr int64_t kMaxRefreshes = 100000;  // of a file; a generator is begun for each

/// The seed after this one, as torch draws it: the last of 15 numbers below 2^63 - 1.
int64_t next_seed(int64_t seed) {
  std::mt19937 draw(static_cast<uint32_t>(seed));
  draw.discard(28);
  const uint64_t high = draw();
  return static_cast<int64_t>((high << 32 | draw()) % ((uint64_t{1} << 63) - 1));
}

struct LowRankReader : AdafactorEntry {
  Error refused(const std::string& why) const {
    return bad(shown(param) + ": adafactor-8bit's low-rank state cannot be recovered: " + why);
  }
  Result<int64_t> integer(const std::string& key) const {
    const auto said = value_in(entry, key);
    if (!said || !said->is(Value::Kind::kInt)) return refused("it has no " + key);
    return said->integer;
  }

  /// Whether lowbit draws the projection that the state belongs to.
  Status same_projection(int64_t number) const {
    ASSIGN_OR_RETURN(step, integer("step"));
    ASSIGN_OR_RETURN(gap, integer("apollo_update_proj_gap"));
    ASSIGN_OR_RETURN(last, integer("last_proj_step"));
    ASSIGN_OR_RETURN(seed, integer("current_proj_seed"));
    if (step < 1 || gap < 1) return refused("step or apollo_update_proj_gap is below 1");
    const int64_t refresh = (step - 1) / gap;
    if (refresh > kMaxRefreshes) return refused("its projection was redrawn too often");
    if (last != 1 + refresh * gap)
      return refused("its projection is of step " + std::to_string(last) + " and not of step " +
                     std::to_string(1 + refresh * gap) +
                     ": apollo_update_proj_gap changed, or steps were taken without it");
    int64_t expected = number;
    for (int64_t i = 0; i < refresh; ++i) expected = next_seed(expected);
    if (seed != expected)
      return refused("its projection has the seed " + std::to_string(seed) +
                     ", and that of matrix " + std::to_string(number) + " is " +
                     std::to_string(expected) + " in step " + std::to_string(step) +
                     ": the parameters had another order, or other steps");
    return fine();
  }

  Status read(int64_t number) {
    // Later versions project momentum too, count from 1 and keep v_low at a refresh.
    if (seed_counter || setting(group, "apollo_beta1") == nullptr)
      return refused("only that of 0.1.9 can, whose groups have apollo_beta1");
    if (setting(group, "apollo_eps") != nullptr) {
      const auto floor = real_setting(group, "apollo_eps");
      if (!floor || !(*floor >= FLT_MIN && *floor <= FLT_MAX))
        return refused("apollo_eps is " + (floor ? std::to_string(*floor) : "no number") +
                       ", and lowbit divides by the root of a positive one");
    }
    for (const auto& [name, leaf] : entry.leaves) {
      if (name == "row_var_low" || name == "col_var_low")
        return refused("apollo_factorize factors it, which lowbit does not");
      if (name == "v_low_q" && leaf->kind == Leaf::Kind::kTensor)
        return refused(
            "it is quantized, and 0.1.9 quantizes it on a GPU only so that it can be "
            "read again; a GPU's projections are other than a CPU's. Start that "
            "optimizer anew");
    }
    ASSIGN_OR_RETURN(v, intact("v_low", "float32"));
    ASSIGN_OR_RETURN(rank, integer("apollo_rank"));
    if (!param.known_shape) return no_shape(param);
    if (param.shape.size() != 2 || rank < 1 || rank >= std::min(param.shape[0], param.shape[1]))
      return refused(
          "lowbit steps matrices in a subspace that are larger than the rank on both "
          "sides, and this is a tensor of shape " +
          shape_text(param.shape) + " and rank " + std::to_string(rank));
    const bool tall = param.shape[0] >= param.shape[1];
    const Shape low = tall ? Shape{param.shape[0], rank} : Shape{rank, param.shape[1]};
    if (v->shape != Shape{static_cast<int64_t>(volume(low))})
      return refused("v_low has shape " + shape_text(v->shape) + " and not the " +
                     std::to_string(volume(low)) + " values of " + shape_text(low));
    RETURN_IF_ERROR(same_projection(number));
    State s = plain_state("variance", *v);
    s.shape = param.shape = low;
    s.is_signed = false;
    param.states.push_back(std::move(s));
    param.numbers.emplace_back("apollo_rank", Value::number(rank));
    if (const Leaf* norm = entry.find("scaled_grad_norm_prev")) {
      ASSIGN_OR_RETURN(value, number_of(*norm));
      param.numbers.emplace_back("update_norm", std::move(value));
    }
    return fine();
  }
};

}  // namespace

bool is_low_rank(const Entry& entry) {
  for (const auto& [name, leaf] : entry.leaves) {
    if (name.starts_with("apollo_seed") || name.find("_low") != std::string::npos) return true;
  }
  return false;
}

Status read_low_rank(const AdafactorEntry& from, int64_t number) {
  return LowRankReader{from}.read(number);
}

}  // namespace lowbit::ckpt
