#include "dialect/torchao/leaf.h"

#include "dialect/common/other_libraries.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/nearest.h"
#include "dialect/torchao/state.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

bool is_fp8(const TorchaoKind& kind) { return std::string_view(kind.name) == "fp8"; }

/// What one kind makes of signed or of unsigned values. Made once: every leaf has the same table.
struct Making {
  std::shared_ptr<const BlockRule> rule;
  std::shared_ptr<Source> table;  // null for fp8

  Making(const TorchaoKind& kind, bool is_signed) {
    if (is_fp8(kind)) {
      rule = torchao_float8_rule();
      return;
    }
    const std::vector<float> map = codebook_of(is_signed ? kind.with_sign : kind.without);
    rule = torchao_rule(map);
    table = held_floats(map);
  }
};

const Making& making(const TorchaoKind& kind, bool is_signed) {
  static const std::vector<Making> all = [] {
    std::vector<Making> made;
    for (const TorchaoKind& k : kTorchaoKinds)
      made.emplace_back(k, false), made.emplace_back(k, true);
    return made;
  }();
  return all[2 * static_cast<size_t>(&kind - kTorchaoKinds) + is_signed];
}

}  // namespace

Leaf torchao_leaf(const TorchaoKind& kind, const Dtype* dtype, const Shape& shape, bool is_signed,
                  int64_t block, std::shared_ptr<Source> codes, std::shared_ptr<Source> scales) {
  const auto n = static_cast<int64_t>(volume(shape));
  Leaf leaf;
  leaf.kind = Leaf::Kind::kSubclass;
  leaf.dtype = dtype;
  leaf.shape = shape;
  leaf.cls = std::string(kind.module) + "." + kind.cls;
  leaf.attributes.kind = Value::Kind::kDict;
  leaf.parts.push_back(tensor_leaf({Key("codes")},
                                   find_dtype(is_fp8(kind) ? "float8_e4m3fn" : "uint8"),
                                   kind.bits == 4 ? Shape{n / 2} : shape, std::move(codes)));
  leaf.parts.push_back(
      tensor_leaf({Key("scale")}, find_dtype("float32"), {n / block}, std::move(scales)));
  if (const auto& table = making(kind, is_signed).table) {
    leaf.parts.push_back(
        tensor_leaf({Key("qmap")}, find_dtype("float32"), {int64_t{1} << kind.bits}, table));
    leaf.attributes.set("signed", Value::boolean(is_signed));
  }
  if (kind.bits == 4) leaf.attributes.set("_shape", size_value(shape));
  leaf.attributes.set("block_size", Value::number(block));
  return leaf;
}

Leaf torchao_coded(const TorchaoKind& kind, const Dtype* dtype, const Shape& shape, bool is_signed,
                   int64_t block, std::shared_ptr<Floats> values, StateReport* report) {
  const BlockLayout layout{
      .count = volume(shape), .block = block, .bits = kind.bits, .high_first = true};
  const auto& rule = making(kind, is_signed).rule;
  auto codes = block_codes(rule, layout, values, report);
  auto scales = float32_source(block_scales(rule, layout, values, 0));
  return torchao_leaf(kind, dtype, shape, is_signed, block, std::move(codes), std::move(scales));
}

std::function<Result<Leaf>(const Box&)> torchao_recut(const TorchaoKind& kind, const Leaf& leaf,
                                                      bool is_signed, int64_t block,
                                                      std::shared_ptr<Floats> values,
                                                      StateReport* report, bool exact) {
  return [=, kind = &kind, whole = leaf.shape, dtype = leaf.dtype,
          name = leaf.name()](const Box& box) -> Result<Leaf> {
    for (size_t d = 1; d < box.shape.size(); ++d) {
      if (box.shape[d] != whole[d])
        return bad(printable(name) + ": a " + kind->cls + " can only be cut along dimension 0");
    }
    const uint64_t n = volume(box.shape);
    uint64_t begin = 0;
    if (n > 0 && !box.shape.empty())
      begin = static_cast<uint64_t>(box.offset[0]) * (n / static_cast<uint64_t>(box.shape[0]));
    auto part = floats_by([values, begin](uint64_t first, uint64_t count, float* out) {
      return values->read(begin + first, count, out);
    });
    if (n >= kTorchaoMin && n % static_cast<uint64_t>(block) == 0) {
      if (exact)
        return mismatch(printable(name) + ": the part at " + shape_text(box.offset) +
                        " would have to be rounded again, because its blocks begin elsewhere; "
                        "another number of ranks may not need that");
      return torchao_coded(*kind, dtype, box.shape, is_signed, block, part, report);
    }
    const bool narrow = std::string_view(dtype->name) == "bfloat16";
    return tensor_leaf({}, find_dtype(narrow ? "bfloat16" : "float32"), box.shape,
                       narrow ? bfloat16_source(part, report) : float32_source(part));
  };
}

Result<std::function<Result<Leaf>(const Box&)>> torchao_recut(const Document& document,
                                                              const Leaf& leaf) {
  ASSIGN_OR_RETURN(read, torchao_state(document, leaf));
  if (read.kind == nullptr) return std::function<Result<Leaf>(const Box&)>();
  return torchao_recut(*read.kind, leaf, read.state.is_signed, read.block, read.state.values,
                       nullptr, false);
}

}  // namespace lowbit::ckpt
