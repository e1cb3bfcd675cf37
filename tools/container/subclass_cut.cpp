#include "container/subclass_cut.h"

#include <algorithm>
#include <numeric>

#include "container/joined.h"
#include "container/record_reader.h"
#include "container/strided.h"
#include "container/zip.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// Row-major values of a record.
class RecordSource : public Source {
 public:
  RecordSource(std::shared_ptr<const Manifest> manifest, Payload payload, std::string what)
      : manifest_(std::move(manifest)), payload_(std::move(payload)), what_(std::move(what)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const auto width = static_cast<uint64_t>(payload_.dtype->bytes);
    return manifest_->container->reader().read(payload_.record, (payload_.first + first) * width,
                                               out, count * width, what_);
  }

 private:
  std::shared_ptr<const Manifest> manifest_;
  Payload payload_;
  std::string what_;
};

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
    LB_TRY(part, subclass_chunk(document, leaf, chunk));
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
  LB_CHECK(a.source->read(0, volume(a.shape), left.data()));
  LB_CHECK(b.source->read(0, volume(b.shape), right.data()));
  return left == right;
}

}  // namespace

bool is_subclass(const Leaf& leaf) {
  return leaf.kind == Leaf::Kind::kSubclass ||
         (leaf.kind == Leaf::Kind::kTensor && leaf.source == nullptr);
}

Result<Leaf> cut_subclass(const Document& document, const Leaf& leaf, const Box& box,
                          bool& inside) {
  inside = false;
  const std::string name = printable(leaf.name());
  LB_TRY(sources, wholes(document, leaf, box, inside));
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
  std::vector<std::vector<Run>> runs(out.parts.size());
  std::vector<uint64_t> counts(out.parts.size(), 0);
  for (const Whole& w : sources) {
    const Box common = common_box(w.box, box);
    for (size_t d = 1; d < box.shape.size(); ++d) {
      if (box.shape[d] != leaf.shape[d] || w.box.shape[d] != leaf.shape[d])
        return bad(name + ": a " + printable(out.cls) + " can only be cut along dimension 0");
    }
    if (w.leaf.cls != out.cls || block_of(w.leaf) != block ||
        w.leaf.parts.size() != out.parts.size())
      return bad(name + ": its chunks are quantized in different ways");
    const uint64_t n = volume(w.box.shape);
    const int64_t row = static_cast<int64_t>(volume(leaf.shape)) / leaf.shape[0];
    const int64_t first = (common.offset[0] - w.box.offset[0]) * row, count = common.shape[0] * row;
    if (first % block != 0 || count % block != 0) {
      inside = true;
      const int64_t step = block / std::gcd(block, row);
      const int64_t at = first % block != 0 ? common.offset[0] : common.offset[0] + common.shape[0];
      const int64_t low = w.box.offset[0] + (at - w.box.offset[0]) / step * step;
      return bad(name + ": a cut at row " + std::to_string(at) + " falls inside a block of " +
                 std::to_string(block) + "; the nearest rows at which none does are " +
                 std::to_string(low) + " and " + std::to_string(low + step) +
                 " (other numbers of ranks may cut there; --requantize makes new codes)");
    }
    for (size_t i = 0; i < out.parts.size(); ++i) {
      const Leaf& part = w.leaf.parts[i];
      const std::string inner = part.path[0].text();
      if (inner != out.parts[i].path[0].text() || part.dtype != out.parts[i].dtype)
        return bad(name + ": its chunks are quantized in different ways");
      if (inner == "qmap") {
        LB_TRY(same, same_values(part, sources[0].leaf.parts[i]));
        if (!same) return bad(name + ": its chunks have different tables of values");
        if (counts[i] == 0) runs[i].push_back({part.source, volume(part.shape)});
        counts[i] = volume(part.shape);
        continue;
      }
      // Codes, of which one may hold several elements, or scales, of which one holds a block.
      const uint64_t held = volume(part.shape), each = held == 0 ? 0 : n / held;
      if (held == 0 || n % held != 0 || static_cast<uint64_t>(block) % each != 0)
        return bad(name + ": its " + printable(inner) + " is in no rhythm with its blocks");
      runs[i].push_back(
          {part.source, static_cast<uint64_t>(count) / each, static_cast<uint64_t>(first) / each});
      counts[i] += static_cast<uint64_t>(count) / each;
    }
  }
  for (size_t i = 0; i < out.parts.size(); ++i) {
    Leaf& part = out.parts[i];
    const bool as_outer = part.shape == sources[0].box.shape && part.path[0].text() != "qmap";
    part.source = joined(std::move(runs[i]), part.dtype->bytes);
    part.shape = as_outer ? box.shape : Shape{static_cast<int64_t>(counts[i])};
    part.stored = nullptr;
  }
  for (size_t i = 0; i + 1 < out.attributes.items.size(); i += 2) {
    Value& value = out.attributes.items[i + 1];
    const std::string& key = out.attributes.items[i].text;
    const bool sizes = value.is(Value::Kind::kSize) || value.is(Value::Kind::kTuple) ||
                       value.is(Value::Kind::kList);
    if ((key != "shape" && key != "_shape") || !sizes) continue;
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
  LB_TRY(stored, document.manifest->container->stored(*leaf.stored, chunk));
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
    inner.source = std::make_shared<RecordSource>(document.manifest, std::move(payload), what);
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
  LB_TRY(whole, cut_subclass(document, leaf, {Shape(leaf.shape.size(), 0), leaf.shape}, inside));
  whole.path = leaf.path;
  return whole;
}

Result<uint64_t> kept_bytes(const Manifest& manifest, const Tensor& tensor, const Chunk& chunk) {
  LB_TRY(stored, manifest.container->stored(tensor, chunk));
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
    LB_TRY(some, kept_bytes(*document.manifest, *leaf.stored, chunk));
    bytes += some;
  }
  return bytes;
}

Result<uint64_t> archive_length(const TorchArchive& archive) {
  Output counter;
  ZipWriter zip(counter);
  LB_CHECK(zip.record("data.pkl", archive.pickle));
  LB_CHECK(zip.record(".format_version", "1"));
  LB_CHECK(zip.record(".storage_alignment", "64"));
  LB_CHECK(zip.record("byteorder", "little"));
  for (size_t i = 0; i < archive.storages.size(); ++i) {
    LB_CHECK(zip.begin("data/" + std::to_string(i), archive.storages[i].bytes));
    LB_CHECK(zip.skip(archive.storages[i].bytes));
    LB_CHECK(zip.end());
  }
  LB_CHECK(zip.close());
  return counter.position();
}

}  // namespace lowbit::ckpt
