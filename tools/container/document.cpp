#include "container/document.h"

#include <algorithm>

#include "container/box.h"
#include "container/tensor_reader.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// A tensor of a manifest, by ranges of its row-major order.
class StoredSource : public Source {
 public:
  StoredSource(std::shared_ptr<const Manifest> manifest, const Tensor& tensor)
      : manifest_(std::move(manifest)), tensor_(tensor), reader_(*manifest_) {}

  Status read(uint64_t first, uint64_t count, void* out) override {
    return read_range(Box{Shape(tensor_.shape.size(), 0), tensor_.shape}, 0, first, count,
                      static_cast<char*>(out));
  }

 private:
  /// Elements [first, first + count) of the box, whose dimensions before `d` are of one element.
  Status read_range(Box box, size_t d, uint64_t first, uint64_t count, char* out) {
    if (count == 0) return fine();
    if (first == 0 && count == volume(box.shape)) return reader_.read(tensor_, box, out);
    const auto width = static_cast<uint64_t>(tensor_.dtype->bytes);
    const uint64_t row = volume(box.shape) / static_cast<uint64_t>(box.shape[d]);
    // A part of the first row, whole rows, a part of the last.
    while (count > 0) {
      Box part = box;
      const auto at = static_cast<int64_t>(first / row);
      const uint64_t inside = first % row;
      part.offset[d] = box.offset[d] + at;
      uint64_t n;
      if (inside == 0 && count >= row) {
        part.shape[d] = static_cast<int64_t>(count / row);
        n = count / row * row;
        LB_CHECK(reader_.read(tensor_, part, out));
      } else {
        part.shape[d] = 1;
        n = std::min(count, row - inside);
        LB_CHECK(read_range(part, d + 1, inside, n, out));
      }
      first += n;
      count -= n;
      out += n * width;
    }
    return fine();
  }

  std::shared_ptr<const Manifest> manifest_;
  const Tensor& tensor_;
  TensorReader reader_;
};

/// Makes the leaf of a tensor subclass a kSubclass with a leaf for each inner tensor.
void add_parts(Leaf& leaf, const std::shared_ptr<const Manifest>& manifest, const Tensor& t,
               Stored stored) {
  const auto inner = std::make_shared<Manifest>();
  inner->kind = manifest->kind;
  inner->path = manifest->path;
  inner->container = manifest->container;
  for (const auto& [name, payload] : stored.parts) {
    Tensor part{t.name, t.path, payload.dtype, payload.shape, {}};
    part.chunks.push_back({Shape(payload.shape.size(), 0), payload.shape, t.chunks[0].place});
    part.part = name;
    inner->tensors.push_back(std::move(part));
  }
  leaf.kind = Leaf::Kind::kSubclass;
  leaf.source = nullptr;
  leaf.cls = std::move(stored.cls);
  leaf.attributes = std::move(stored.attributes);
  for (const Tensor& part : inner->tensors) {
    Leaf l;
    l.path = {Key(part.part)};
    l.dtype = part.dtype;
    l.shape = part.shape;
    l.source = source_of(inner, part);
    leaf.parts.push_back(std::move(l));
  }
}

}  // namespace

std::shared_ptr<Source> source_of(std::shared_ptr<const Manifest> manifest, const Tensor& tensor) {
  return std::make_shared<StoredSource>(std::move(manifest), tensor);
}

const Leaf* Document::find(std::string_view name) const {
  for (const Leaf& leaf : leaves) {
    if (leaf.name() == name) return &leaf;
  }
  return nullptr;
}

Result<Document> document_of(std::shared_ptr<const Manifest> manifest) {
  Document out;
  out.manifest = manifest;
  out.holders = manifest->holders;
  std::vector<size_t> order = manifest->order;
  if (order.empty()) {
    order.resize(manifest->tensors.size() + manifest->blobs.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  }
  for (const size_t i : order) {
    Leaf leaf;
    if (i < manifest->tensors.size()) {
      const Tensor& t = manifest->tensors[i];
      leaf.path = t.path;
      leaf.dtype = t.dtype;
      leaf.shape = t.shape;
      leaf.stored = &t;
      leaf.source = source_of(manifest, t);
      if (manifest->kind != ContainerKind::kDcp) {
        LB_TRY(stored, manifest->container->stored(t, t.chunks[0]));
        if (!stored.cls.empty()) add_parts(leaf, manifest, t, std::move(stored));
      }
    } else {
      const Blob& b = manifest->blobs[i - manifest->tensors.size()];
      leaf.path = b.path;
      leaf.blob = &b;
      const auto value = b.value ? Result<Value>(*b.value) : manifest->container->value(b);
      leaf.kind = value.ok() ? Leaf::Kind::kValue : Leaf::Kind::kOpaque;
      if (value.ok()) leaf.value = value.value();
    }
    out.leaves.push_back(std::move(leaf));
  }
  return out;
}

Status for_elements(const Leaf& leaf, uint64_t begin, uint64_t end, uint64_t most,
                    const std::function<Status(const char*, uint64_t, uint64_t)>& use) {
  const auto width = static_cast<uint64_t>(leaf.dtype->bytes);
  const uint64_t at_once = std::max<uint64_t>(1, most / width);
  std::string buffer;
  for (uint64_t at = begin; at < end; at += at_once) {
    const uint64_t count = std::min(at_once, end - at);
    buffer.resize(count * width);
    LB_CHECK(leaf.source->read(at, count, buffer.data()));
    LB_CHECK(use(buffer.data(), at, count));
  }
  return fine();
}

}  // namespace lowbit::ckpt
