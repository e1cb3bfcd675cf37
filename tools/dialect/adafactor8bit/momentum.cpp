// Reading momentum of adafactor-8bit: 4 bits or 8, in six ways (AdafactorMomentum), of which the
// newer files name theirs.
#include <algorithm>

#include "dialect/adafactor8bit/adafactor8bit.h"
#include "dialect/adafactor8bit/rules.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

struct MomentumReader : AdafactorEntry {
  Result<AdafactorMomentum> kind_of(bool four, const Leaf& q, const BlockLayout& layout) const {
    auto type = value_in(entry, "m_quant_type");
    if (!type || !type->is(Value::Kind::kText)) {
      const Value* set = setting(group, "m_quant_type");
      if (set != nullptr) type = *set;
    }
    if (type && type->is(Value::Kind::kText)) {
      using enum AdafactorMomentum;
      for (const AdafactorMomentum kind : {kUniform4, kUniform8, kDynamic4, kDynamic8}) {
        if (type->text != name_of(kind)) continue;
        if ((bits_of(kind) == 4) != four)
          return bad(what("m_q") + ": is said to be " + type->text + ", but its codes have " +
                     (four ? "4" : "8") + " bits");
        return kind;
      }
      return bad(what("m_quant_type") + ": is " + printable(type->text) +
                 ", which no version that is known writes");
    }
    if (!four) return AdafactorMomentum::kUniform8;
    if (seed_counter) return AdafactorMomentum::kUniform4;
    // 0.2.1 and 0.2.2 never write code 0; the table of 0.2.4 and 0.2.5 has the largest magnitude of
    // half of the blocks there.
    const uint64_t blocks = std::min<uint64_t>(layout.blocks(), 1024);
    std::vector<uint16_t> codes(blocks * static_cast<uint64_t>(layout.block));
    RETURN_IF_ERROR(CodeReader(q.source, layout).read(0, codes.size(), codes.data()));
    if (std::ranges::find(codes, 0) != codes.end()) return AdafactorMomentum::kNormal4;
    uint64_t used = 0;
    for (uint64_t b = 0; b < blocks; ++b) {
      const auto* first = codes.data() + b * static_cast<uint64_t>(layout.block);
      used += !std::all_of(first, first + layout.block, [](uint16_t c) { return c == 8; });
    }
    if (used >= 64) return AdafactorMomentum::kInt4;
    return bad(
        what("m_q") +
        ": is momentum in 4 bits of adafactor-8bit 0.2.1 to 0.2.5, whose versions mean different "
        "numbers by the same codes, and the file does not tell which wrote it");
  }

  Status read(const std::string& name) {
    const Leaf* plain = tensor_in(entry, "m");
    const Leaf* codes = tensor_in(entry, "m_q");
    if (plain == nullptr && codes == nullptr) return fine();
    if (plain != nullptr) {
      State s = plain_state(name, *plain);
      param.learn(s.shape);
      param.states.push_back(std::move(s));
      return fine();
    }
    return read_codes(name);
  }

  /// How the codes lie: the length of a block is in the state or in the group, their width follows
  /// from the sizes.
  Result<BlockLayout> layout_of(const Leaf& q, const Leaf& scale) const {
    const auto block = value_in(entry, "m_block_size");
    const auto set = real_setting(group, "m_block_size");
    const uint64_t blocks = volume(scale.shape), bytes = volume(q.shape);
    const int64_t length = block && block->is(Value::Kind::kInt) ? block->integer
                           : set                                 ? static_cast<int64_t>(*set)
                                                                 : 0;
    const uint64_t codes4 = 2 * bytes;
    if (length <= 0 || blocks == 0 ||
        (static_cast<uint64_t>(length) * blocks != bytes &&
         static_cast<uint64_t>(length) * blocks != codes4))
      return bad(what("m_q") + ": " + std::to_string(bytes) + " bytes and " +
                 std::to_string(blocks) + " scales do not belong together with blocks of " +
                 std::to_string(length));
    const bool four = static_cast<uint64_t>(length) * blocks == codes4;
    BlockLayout layout{.block = length, .bits = four ? 4 : 8, .high_first = true};
    layout.coded = layout.stored = static_cast<uint64_t>(length) * blocks;
    layout.count = param.known_shape ? volume(param.shape) : layout.stored;
    if (layout.count > layout.stored || layout.blocks() != blocks)
      return bad(what("m_q") + ": " + std::to_string(blocks) + " blocks of " +
                 std::to_string(length) + " do not belong to a tensor of shape " +
                 shape_text(param.shape));
    return layout;
  }

  Status read_codes(const std::string& name) {
    State s;
    s.name = name;
    ASSIGN_OR_RETURN(q, intact("m_q", "uint8"));
    ASSIGN_OR_RETURN(scale, intact("m_scale", "float32"));
    if (const auto shape = shape_in(entry, "m_shape")) {
      param.learn(*shape);
    }
    ASSIGN_OR_RETURN(layout, layout_of(*q, *scale));
    const bool four = layout.bits == 4;
    const int64_t length = layout.block;
    ASSIGN_OR_RETURN(kind, kind_of(four, *q, layout));
    s.shape = param.shape;
    s.leaves = {q, scale};
    s.bytes = q->bytes() + scale->bytes();
    s.stored_as = std::string("adafactor-8bit momentum ") + name_of(kind) + ", blocks of " +
                  std::to_string(length);
    if (!param.known_shape) {
      s.stored_as += ", of a shape that the file does not tell (--model PATH gives it)";
      param.states.push_back(std::move(s));
      return fine();
    }
    s.values = block_floats(momentum_rule(kind), layout, q->source, {floats_of(*scale)});
    // The codes of three kinds are also lowbit's.
    const char* same = kind == AdafactorMomentum::kDynamic4   ? "dynamic4"
                       : kind == AdafactorMomentum::kDynamic8 ? "dynamic8"
                       : kind == AdafactorMomentum::kUniform8 ? "uniform8"
                                                              : nullptr;
    if (same != nullptr)
      s.codes = codes_of_rows(s.shape, same, layout.bits, length,
                              four ? swapped_nibbles(q->source) : q->source, scale->source);
    param.states.push_back(std::move(s));
    return fine();
  }
};

}  // namespace

Status read_momentum(const AdafactorEntry& from, const std::string& name) {
  return MomentumReader{from}.read(name);
}

}  // namespace lowbit::ckpt
