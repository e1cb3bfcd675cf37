#include "dialect/torchao/state.h"

#include <algorithm>

#include "container/manifest/record_reader.h"
#include "dialect/numbers/adapters.h"
#include "dialect/numbers/floats.h"
#include "dialect/torchao/rank_box.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<std::vector<TorchaoPiece>> pieces_of(const Document& document, const Leaf& leaf, State& s) {
  std::vector<TorchaoPiece> out;
  const std::string what = printable(leaf.name());
  if (leaf.kind == Leaf::Kind::kSubclass) {
    TorchaoSubclass subclass{leaf.cls, {}, &leaf.attributes, what};
    for (const Leaf& part : leaf.parts) {
      subclass.parts.emplace_back(part.name(), TorchaoInner{part.dtype, part.shape, part.source});
      s.bytes += part.bytes();
    }
    ASSIGN_OR_RETURN(piece, subclass.piece(Shape(leaf.shape.size(), 0), leaf.shape, s.is_signed));
    out.push_back(std::move(piece));
    return out;
  }
  const auto& manifest = document.manifest;
  if (manifest == nullptr || manifest->kind != ContainerKind::kDcp || leaf.stored == nullptr) {
    if (leaf.source == nullptr) return bad(what + ": has no values");
    return out;
  }
  bool any = false;
  for (const Chunk& chunk : leaf.stored->chunks) {
    if (volume(chunk.shape) == 0) continue;
    ASSIGN_OR_RETURN(stored, manifest->container->stored(*leaf.stored, chunk));
    TorchaoSubclass subclass{stored.cls, {}, &stored.attributes, what};
    for (const auto& [name, payload] : stored.parts) {
      if (payload.stride != row_major(payload.shape) && volume(payload.shape) > 1)
        return bad(what + ": its " + (name.empty() ? "values" : printable(name)) +
                   " do not lie row-major");
      TorchaoInner inner{payload.dtype, payload.shape, source_of(manifest, payload, what)};
      s.bytes += volume(payload.shape) * static_cast<uint64_t>(payload.dtype->bytes);
      subclass.parts.emplace_back(name, std::move(inner));
    }
    if (stored.cls.empty()) {
      Leaf plain;
      plain.path = leaf.path;
      plain.dtype = subclass.parts[0].second.dtype;
      plain.source = subclass.parts[0].second.source;
      out.push_back({.offset = chunk.offset, .shape = chunk.shape, .values = floats_of(plain)});
    } else {
      any = true;
      ASSIGN_OR_RETURN(piece, subclass.piece(chunk.offset, chunk.shape, s.is_signed));
      out.push_back(std::move(piece));
    }
  }
  if (!any && leaf.source != nullptr) {
    out.clear();
    s.bytes = 0;
  }
  return out;
}

/// What the pieces are for people, and their codes as one run where their blocks follow one
/// another.
void describe(TorchaoState& out, const std::vector<TorchaoPiece>& pieces) {
  State& s = out.state;
  const auto coded =
      std::ranges::find_if(pieces, [](const TorchaoPiece& p) { return p.kind != nullptr; });
  bool one = coded != pieces.end(), plain = false;
  int64_t row = 0;
  std::vector<Run> codes, scales;
  for (const TorchaoPiece& p : pieces) {
    plain |= p.kind == nullptr;
    one = one && p.kind == coded->kind && p.block == coded->block && p.format == coded->format &&
          !p.format.empty();
    for (size_t d = 1; one && d < s.shape.size(); ++d) one = p.shape[d] == s.shape[d];
    if (!one) continue;
    one = s.shape.empty() || p.offset[0] == row;
    row += s.shape.empty() ? 1 : p.shape[0];
    const uint64_t n = volume(p.shape);
    codes.push_back({p.codes, n * static_cast<uint64_t>(p.kind->bits) / 8});
    scales.push_back({p.scales, n / static_cast<uint64_t>(p.block)});
  }
  if (coded != pieces.end()) out.kind = coded->kind, out.block = coded->block;
  s.stored_as = coded == pieces.end() ? "float32"
                                      : std::string("torchao ") + coded->kind->name +
                                            ", blocks of " + std::to_string(coded->block) +
                                            coded->note + (plain ? ", parts of it plain" : "");
  if (!one || volume(s.shape) == 0) return;
  s.codes = Codes{.format = coded->format,
                  .bits = coded->kind->bits,
                  .rows = 1,
                  .cols = static_cast<int64_t>(volume(s.shape)),
                  .block = coded->block,
                  .codes = joined(std::move(codes), 1),
                  .scales = joined(std::move(scales), 4)};
}

}  // namespace

Result<TorchaoState> torchao_state(const Document& document, const Leaf& leaf) {
  TorchaoState out;
  State& s = out.state;
  s.shape = leaf.shape;
  const std::string name = leaf.name();
  s.is_signed = name == "exp_avg" || name.ends_with(".exp_avg");
  s.leaves = {&leaf};
  ASSIGN_OR_RETURN(pieces, pieces_of(document, leaf, s));
  if (pieces.empty()) {  // plain, all of it
    s.stored_as = leaf.dtype->name;
    s.bytes = leaf.bytes();
    s.values = floats_of(leaf);
    return out;
  }
  describe(out, pieces);
  s.values = pieces.size() == 1 ? pieces[0].values : tiled(leaf.shape, std::move(pieces));
  return out;
}

}  // namespace lowbit::ckpt
