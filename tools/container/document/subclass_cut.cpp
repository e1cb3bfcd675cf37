#include "container/document/subclass_cut.h"

#include <algorithm>
#include <numeric>

#include "container/document/joined.h"
#include "container/manifest/record_reader.h"
#include "container/manifest/strided.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// A chunk of the source: its rows, and a kSubclass.
struct Whole {
  Box box;
  Leaf leaf;
};

Result<std::vector<Whole>> wholes(const Document& document, const Leaf& leaf, const Box& box,
                                  bool& plain) {
  std::vector<Whole> out;
  if (leaf.kind == Leaf::Kind::kSubclass) {
    out.push_back({{Shape(leaf.shape.size(), 0), leaf.shape}, leaf});
    return out;
  }
  for (const Chunk& chunk : leaf.stored->chunks) {
    const Box mine{chunk.offset, chunk.shape};
    if (volume(common_box(mine, box).shape) == 0) continue;
    ASSIGN_OR_RETURN(part, subclass_chunk(document, leaf, chunk));
    if (part.kind != Leaf::Kind::kSubclass) {
      plain = true;
      return bad(printable(part.name()) +
                 ": is a plain tensor, others of its chunks are quantized; --requantize makes new "
                 "codes of both");
    }
    out.push_back({mine, std::move(part)});
  }
  return out;
}

int64_t block_of(const Leaf& leaf) {
  const Value* block = leaf.attributes.find("block_size");
  return block != nullptr && block->is(Value::Kind::kInt) ? block->integer : 0;
}

/// Both hold the same elements: the table of values that codes stand for.
Result<bool> same_values(const Leaf& a, const Leaf& b) {
  if (a.dtype != b.dtype || a.shape != b.shape || a.bytes() > 1u << 20) return false;
  std::string left(a.bytes(), '\0'), right(b.bytes(), '\0');
  RETURN_IF_ERROR(a.source->read(0, volume(a.shape), left.data()));
  RETURN_IF_ERROR(b.source->read(0, volume(b.shape), right.data()));
  return left == right;
}

/// Puts the parts of one subclass together from those of several, row by row.
class PartJoiner {
 public:
  /// `out` has the parts of the first source.
  PartJoiner(const std::string& name, const Leaf& out, int64_t block)
      : name_(name),
        out_(out),
        block_(block),
        runs_(out.parts.size()),
        counts_(out.parts.size(), 0) {}

  /// Adds the rows of `from` that lie in `box`, a box of `whole`. `inside` is set if a cut falls
  /// inside a block.
  Status add(const Leaf& whole, const Whole& from, const Box& box, bool& inside) {
    for (size_t d = 1; d < box.shape.size(); ++d) {
      if (box.shape[d] != whole.shape[d] || from.box.shape[d] != whole.shape[d])
        return bad(name_ + ": a " + printable(out_.cls) + " can only be cut along dimension 0");
    }
    if (from.leaf.cls != out_.cls || block_of(from.leaf) != block_ ||
        from.leaf.parts.size() != out_.parts.size())
      return bad(name_ + ": its chunks are quantized in different ways");
    const Box common = common_box(from.box, box);
    const int64_t row = static_cast<int64_t>(volume(whole.shape)) / whole.shape[0];
    const int64_t first = (common.offset[0] - from.box.offset[0]) * row;
    const int64_t count = common.shape[0] * row;
    if (first % block_ != 0 || count % block_ != 0) {
      inside = true;
      const int64_t step = block_ / std::gcd(block_, row);
      const int64_t at =
          first % block_ != 0 ? common.offset[0] : common.offset[0] + common.shape[0];
      const int64_t low = from.box.offset[0] + (at - from.box.offset[0]) / step * step;
      return bad(name_ + ": a cut at row " + std::to_string(at) + " falls inside a block of " +
                 std::to_string(block_) + "; the nearest rows at which none does are " +
                 std::to_string(low) + " and " + std::to_string(low + step) +
                 " (other numbers of ranks may cut there; --requantize makes new codes)");
    }
    for (size_t i = 0; i < out_.parts.size(); ++i)
      RETURN_IF_ERROR(
          add_part(i, from, static_cast<uint64_t>(first), static_cast<uint64_t>(count)));
    return fine();
  }

  std::shared_ptr<Source> source(size_t part) {
    return joined(std::move(runs_[part]), out_.parts[part].dtype->bytes);
  }
  int64_t count(size_t part) const { return static_cast<int64_t>(counts_[part]); }

 private:
  /// Elements [first, first + count) of the subclass, in the elements of its part i.
  Status add_part(size_t i, const Whole& from, uint64_t first, uint64_t count) {
    const Leaf& part = from.leaf.parts[i];
    const std::string inner = part.path[0].text();
    if (inner != out_.parts[i].path[0].text() || part.dtype != out_.parts[i].dtype)
      return bad(name_ + ": its chunks are quantized in different ways");
    const uint64_t held = volume(part.shape);
    if (inner == "qmap") {
      ASSIGN_OR_RETURN(same, same_values(part, out_.parts[i]));
      if (!same) return bad(name_ + ": its chunks have different tables of values");
      if (counts_[i] == 0) runs_[i].push_back({part.source, held});
      counts_[i] = held;
      return fine();
    }
    // One element of codes may hold several of the subclass, one of scales holds a block.
    const uint64_t n = volume(from.box.shape), each = held == 0 ? 0 : n / held;
    if (held == 0 || n % held != 0 || static_cast<uint64_t>(block_) % each != 0)
      return bad(name_ + ": the size of its " + printable(inner) + " does not fit its blocks");
    runs_[i].push_back({part.source, count / each, first / each});
    counts_[i] += count / each;
    return fine();
  }

  const std::string name_;
  const Leaf out_;
  const int64_t block_;
  std::vector<std::vector<Run>> runs_;
  std::vector<uint64_t> counts_;
};

}  // namespace

bool is_subclass(const Leaf& leaf) {
  return leaf.kind == Leaf::Kind::kSubclass ||
         (leaf.kind == Leaf::Kind::kTensor && leaf.source == nullptr);
}

Result<Leaf> cut_subclass(const Document& document, const Leaf& leaf, const Box& box,
                          bool& inside) {
  inside = false;
  const std::string name = printable(leaf.name());
  ASSIGN_OR_RETURN(sources, wholes(document, leaf, box, inside));
  if (sources.empty()) return bad(name + ": has no elements that could be cut");
  Leaf out = sources[0].leaf;
  out.path = {};
  out.stored = nullptr;
  out.shape = box.shape;
  if (sources.size() == 1 && sources[0].box.offset == box.offset &&
      sources[0].box.shape == box.shape)
    return out;

  const int64_t block = block_of(out);
  if (block <= 0) return bad(name + ": a " + printable(out.cls) + " has no blocks to cut between");
  PartJoiner parts(name, out, block);
  for (const Whole& w : sources) RETURN_IF_ERROR(parts.add(leaf, w, box, inside));
  for (size_t i = 0; i < out.parts.size(); ++i) {
    Leaf& part = out.parts[i];
    const bool as_outer = part.shape == sources[0].box.shape && part.path[0].text() != "qmap";
    part.source = parts.source(i);
    part.shape = as_outer ? box.shape : Shape{parts.count(i)};
    part.stored = nullptr;
  }
  for (size_t i = 0; i + 1 < out.attributes.items.size(); i += 2) {
    Value& value = out.attributes.items[i + 1];
    const std::string& key = out.attributes.items[i].text;
    if ((key != "shape" && key != "_shape") || !value.is_row()) continue;
    value.items.clear();
    for (const int64_t size : box.shape) value.items.push_back(Value::number(size));
  }
  return out;
}

Result<Leaf> subclass_chunk(const Document& document, const Leaf& leaf, const Chunk& chunk) {
  Leaf out;
  out.path = {Key(leaf.name() + " at " + shape_text(chunk.offset))};
  out.dtype = leaf.dtype;
  out.shape = chunk.shape;
  const std::string what = printable(out.name());
  ASSIGN_OR_RETURN(stored, document.manifest->container->stored(*leaf.stored, chunk));
  out.cls = stored.cls;
  out.attributes = std::move(stored.attributes);
  for (auto& [name, payload] : stored.parts) {
    if (payload.stride != row_major(payload.shape))
      return bad(what + ": its " + (name.empty() ? "values are" : printable(name) + " is") +
                 " not row-major");
    Leaf inner;
    inner.path = {Key(name)};
    inner.dtype = payload.dtype;
    inner.shape = payload.shape;
    inner.source = source_of(document.manifest, std::move(payload), what);
    out.parts.push_back(std::move(inner));
  }
  if (!out.cls.empty()) {
    out.kind = Leaf::Kind::kSubclass;
  } else {
    out.source = out.parts[0].source;
    out.parts.clear();
  }
  return out;
}

Result<Leaf> whole_subclass(const Document& document, const Leaf& leaf) {
  bool inside = false;
  ASSIGN_OR_RETURN(whole,
                   cut_subclass(document, leaf, {Shape(leaf.shape.size(), 0), leaf.shape}, inside));
  whole.path = leaf.path;
  return whole;
}

Result<uint64_t> kept_bytes(const Manifest& manifest, const Tensor& tensor, const Chunk& chunk) {
  ASSIGN_OR_RETURN(stored, manifest.container->stored(tensor, chunk));
  uint64_t bytes = 0;
  for (const auto& [name, payload] : stored.parts)
    bytes += volume(payload.shape) * static_cast<uint64_t>(payload.dtype->bytes);
  return bytes;
}

Result<uint64_t> kept_bytes(const Document& document, const Leaf& leaf) {
  uint64_t bytes = 0;
  for (const Leaf& part : leaf.parts) bytes += part.bytes();
  if (leaf.kind != Leaf::Kind::kTensor) return bytes;
  if (!is_subclass(leaf)) return leaf.bytes();
  for (const Chunk& chunk : leaf.stored->chunks) {
    ASSIGN_OR_RETURN(some, kept_bytes(*document.manifest, *leaf.stored, chunk));
    bytes += some;
  }
  return bytes;
}

}  // namespace lowbit::ckpt
