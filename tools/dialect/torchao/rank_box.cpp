#include "dialect/torchao/rank_box.h"

#include <algorithm>

#include "dialect/numbers/adapters.h"
#include "dialect/requantize/blocks.h"
#include "dialect/requantize/nearest.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

class Tiled : public Floats {
 public:
  Tiled(Shape shape, std::vector<TorchaoPiece> pieces)
      : shape_(std::move(shape)), stride_(row_major(shape_)), pieces_(std::move(pieces)) {}
  Status do_read(uint64_t first, uint64_t count, float* out) override {
    while (count > 0) {
      const Shape at = index_of(shape_, first);
      const auto inside = [&](const TorchaoPiece& p) {
        for (size_t d = 0; d < at.size(); ++d) {
          if (at[d] < p.offset[d] || at[d] >= p.offset[d] + p.shape[d]) return false;
        }
        return true;
      };
      const auto piece = std::ranges::find_if(pieces_, inside);
      if (piece == pieces_.end()) return bad("an element is in no part");
      const Shape local = row_major(piece->shape);
      // Up to the end of the piece along the last dimension behind which it has all there is.
      size_t d = shape_.size();
      while (d > 1 && piece->shape[d - 1] == shape_[d - 1]) --d;
      const uint64_t place = position(at, local) - position(piece->offset, local);
      int64_t run = 1;
      if (!at.empty()) {
        const size_t k = d - 1;
        run = (piece->offset[k] + piece->shape[k] - at[k]) * stride_[k];
        for (size_t j = k + 1; j < at.size(); ++j) run -= at[j] * stride_[j];
      }
      const uint64_t n = std::min(count, static_cast<uint64_t>(run));
      RETURN_IF_ERROR(piece->values->read(place, n, out));
      first += n, count -= n, out += n;
    }
    return fine();
  }

 private:
  const Shape shape_, stride_;
  const std::vector<TorchaoPiece> pieces_;
};

}  // namespace

Result<const TorchaoInner*> TorchaoSubclass::needed(const char* name, const char* dtype) const {
  for (const auto& [key, inner] : parts) {
    if (key != name) continue;
    if (std::string_view(inner.dtype->name) != dtype)
      return bad(what + ": its " + name + " are " + inner.dtype->name + ", not " + dtype);
    return &inner;
  }
  return bad(what + ": is a " + cls + " without " + name);
}

Result<TorchaoPiece> TorchaoSubclass::piece(const Shape& offset, const Shape& shape,
                                            bool is_signed) const {
  TorchaoPiece out{.offset = offset, .shape = shape, .kind = torchao_kind(cls)};
  if (out.kind == nullptr)
    return bad(what + ": is a " + printable(cls) + ", which is none of torchao's states");
  const bool fp8 = out.kind->bits == 8 && std::string_view(out.kind->name) == "fp8";
  ASSIGN_OR_RETURN(codes, needed("codes", fp8 ? "float8_e4m3fn" : "uint8"));
  ASSIGN_OR_RETURN(scale, needed("scale", "float32"));
  if (const Value* said = attributes->find("signed")) is_signed = said->integer != 0;
  const uint64_t n = volume(shape), per = 8 / static_cast<uint64_t>(out.kind->bits);
  const uint64_t blocks = volume(scale->shape);
  if (volume(codes->shape) * per != n || (per == 1 && codes->shape != shape))
    return bad(what + ": has codes of the shape " + shape_text(codes->shape) +
               " for values of the shape " + shape_text(shape));
  if (scale->shape.size() != 1 || (n > 0 && (blocks == 0 || n % blocks != 0)))
    return bad(what + ": " + shape_text(scale->shape) + " scales do not part " + std::to_string(n) +
               " values into blocks");
  out.block = n == 0 ? out.kind->block : static_cast<int64_t>(n / blocks);
  if (const Value* said = attributes->find("block_size");
      said != nullptr && n > 0 && (!said->is(Value::Kind::kInt) || said->integer != out.block))
    return bad(what + ": says that its blocks have " + std::to_string(said->integer) +
               " values, but there are " + std::to_string(blocks) + " scales for " +
               std::to_string(n));
  if (per > 1 && out.block % 2 != 0)
    return bad(what + ": blocks of " + std::to_string(out.block) + " values end inside a byte");
  BlockLayout layout{.count = n,
                     .block = std::max<int64_t>(1, out.block),
                     .bits = out.kind->bits,
                     .high_first = true};
  out.format = is_signed ? out.kind->with_sign : out.kind->without;
  std::shared_ptr<const BlockRule> rule;
  if (fp8) {
    rule = torchao_float8_rule();
  } else {
    ASSIGN_OR_RETURN(map_leaf, needed("qmap", "float32"));
    const uint64_t entries = uint64_t{1} << out.kind->bits;
    if (map_leaf->shape != Shape{static_cast<int64_t>(entries)})
      return bad(what + ": has a table of the shape " + shape_text(map_leaf->shape) + ", not [" +
                 std::to_string(entries) + "]");
    std::vector<float> map(entries);
    RETURN_IF_ERROR(map_leaf->source->read(0, entries, map.data()));
    rule = std::make_shared<TableRule>(map);
    // Tables that were made under another default dtype, or on another machine.
    out.format = format_of_table(map, is_signed);
    if (out.format.empty()) out.note = ", by its own table";
  }
  out.values =
      block_floats(std::move(rule), layout, codes->source, {float32_floats(scale->source)});
  out.codes = per > 1 ? swapped_nibbles(codes->source) : codes->source;
  out.scales = scale->source;
  return out;
}

std::shared_ptr<Floats> tiled(Shape shape, std::vector<TorchaoPiece> pieces) {
  return std::make_shared<Tiled>(std::move(shape), std::move(pieces));
}

}  // namespace lowbit::ckpt
