// Reading the states of torchao's Adam8bit, Adam4bit, AdamFp8 and their AdamW.
//
// exp_avg, exp_avg_sq and max_exp_avg_sq are tensor subclasses with inner tensors `codes`, `scale`
// and (but for fp8) `qmap`, in blocks of the flattened tensor; parameters that are small, or no
// multiple of a block, have plain tensors. The length of a block follows from the sizes. A directory
// of ranks holds one subclass for each rank's part, with blocks of its own, and a rank whose part is
// no multiple of a block holds a plain one.
#include "dialect/torchao.h"

#include <algorithm>
#include <charconv>
#include <functional>

#include "container/record_reader.h"
#include "container/tensor_reader.h"
#include "dialect/adapters.h"
#include "dialect/peer.h"
#include "dialect/torchao_piece.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

/// The class of a leaf, wherever its container keeps it; "" for a plain tensor.
Result<std::string> class_of(const Document& document, const Leaf& leaf) {
  if (leaf.kind == Leaf::Kind::kSubclass) return leaf.cls;
  if (leaf.kind != Leaf::Kind::kTensor || leaf.source != nullptr || leaf.stored == nullptr ||
      leaf.stored->chunks.empty())
    return std::string();
  for (const Chunk& chunk : leaf.stored->chunks) {
    LB_TRY(stored, document.manifest->container->stored(*leaf.stored, chunk));
    if (!stored.cls.empty()) return stored.cls;
  }
  return std::string();
}

Result<int> recognize(const Document& document) {
  if (!has_skeleton(document)) return 0;
  LB_TRY(skeleton, skeleton_of(document));
  for (const Entry& entry : skeleton.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      LB_TRY(cls, class_of(document, *leaf));
      if (torchao_kind(cls) != nullptr) return 3;
    }
  }
  return 0;
}

/// Elements of a payload that is row-major.
class PayloadSource : public Source {
 public:
  PayloadSource(std::shared_ptr<const Manifest> manifest, Payload payload, std::string what)
      : manifest_(std::move(manifest)),
        payload_(std::move(payload)),
        what_(std::move(what)),
        reader_(*manifest_) {
    payload_.shape = {static_cast<int64_t>(volume(payload_.shape))};
    payload_.stride = {1};
  }
  Status read(uint64_t first, uint64_t count, void* out) override {
    if (count == 0) return fine();
    return reader_.read(payload_, Box{{static_cast<int64_t>(first)}, {static_cast<int64_t>(count)}},
                        static_cast<char*>(out), what_);
  }

 private:
  const std::shared_ptr<const Manifest> manifest_;
  Payload payload_;
  const std::string what_;
  TensorReader reader_;
};

Result<std::vector<TorchaoPiece>> pieces_of(const Document& document, const Leaf& leaf, State& s) {
  std::vector<TorchaoPiece> out;
  const std::string what = printable(leaf.name());
  if (leaf.kind == Leaf::Kind::kSubclass) {
    TorchaoSubclass subclass{leaf.cls, {}, &leaf.attributes, what};
    for (const Leaf& part : leaf.parts) {
      subclass.parts.emplace_back(part.name(), TorchaoInner{part.dtype, part.shape, part.source});
      s.bytes += part.bytes();
    }
    LB_TRY(piece, subclass.piece(Shape(leaf.shape.size(), 0), leaf.shape, s.is_signed));
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
    LB_TRY(stored, manifest->container->stored(*leaf.stored, chunk));
    TorchaoSubclass subclass{stored.cls, {}, &stored.attributes, what};
    for (const auto& [name, payload] : stored.parts) {
      if (payload.stride != row_major(payload.shape) && volume(payload.shape) > 1)
        return bad(what + ": its " + (name.empty() ? "values" : printable(name)) +
                   " do not lie row-major");
      TorchaoInner inner{payload.dtype, payload.shape,
                         std::make_shared<PayloadSource>(manifest, payload, what)};
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
      LB_TRY(piece, subclass.piece(chunk.offset, chunk.shape, s.is_signed));
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
  const auto coded = std::find_if(pieces.begin(), pieces.end(),
                                  [](const TorchaoPiece& p) { return p.kind != nullptr; });
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

/// A state of a parameter, whose shape it tells.
Status add_state(const Document& document, const std::string& name, const Leaf& leaf,
                 Param& param) {
  if (param.known_shape && param.shape != leaf.shape)
    return bad(printable(leaf.name()) + ": has the shape " + shape_text(leaf.shape) +
               ", another state of its parameter " + shape_text(param.shape));
  param.shape = leaf.shape;
  param.known_shape = true;
  LB_TRY(read, torchao_state(document, leaf));
  read.state.name = name;
  param.states.push_back(std::move(read.state));
  return fine();
}

/// torchao keeps the learning rate in float32. The shortest decimal number of that float32 is what
/// the user wrote, as far as anyone can tell.
Value as_written(const Value& value) {
  const auto narrow = static_cast<float>(value.real);
  if (!value.is(Value::Kind::kFloat) || static_cast<double>(narrow) != value.real) return value;
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, narrow);
  double wide = value.real;
  std::from_chars(text, end.ptr, wide);
  return Value::floating(wide);
}

}  // namespace

Result<TorchaoState> torchao_state(const Document& document, const Leaf& leaf) {
  TorchaoState out;
  State& s = out.state;
  s.shape = leaf.shape;
  const std::string name = leaf.name();
  s.is_signed = name == "exp_avg" || name.ends_with(".exp_avg");
  s.leaves = {&leaf};
  LB_TRY(pieces, pieces_of(document, leaf, s));
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

const TorchaoKind* torchao_kind(const std::string& cls) {
  if (!cls.starts_with("torchao.")) return nullptr;
  for (const TorchaoKind& kind : kTorchaoKinds) {
    if (cls.ends_with(std::string(".") + kind.cls)) return &kind;
  }
  return nullptr;
}

Result<Model> read_torchao(std::shared_ptr<const Document> document) {
  LB_TRY(skeleton, skeleton_of(*document));
  Model out = model_of(skeleton, "torchao", document);
  for (size_t i = 0; i < out.params.size(); ++i) {
    Param& param = out.params[i];
    const Entry& entry = skeleton.params[i];
    LB_CHECK(read_step(entry, param));
    for (const char* name : kStates) {
      if (const Leaf* leaf = entry.find(name)) LB_CHECK(add_state(*document, name, *leaf, param));
    }
  }
  for (Group& group : out.groups) {
    for (auto& [name, value] : group.settings) {
      if (name == "lr" || name == "initial_lr") value = as_written(value);
    }
  }
  out.algorithm = "adam";
  return out;
}

extern const Dialect kTorchao = {"torchao",
                                 "torchao's AdamW8bit, AdamW4bit, AdamWFp8 and their Adam",
                                 recognize, read_torchao, write_torchao};

}  // namespace lowbit::ckpt
