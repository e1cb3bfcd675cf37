#include "container/document/document.h"

#include <algorithm>

#include "container/manifest/ranges.h"
#include "container/manifest/record_reader.h"
#include "container/manifest/tensor_reader.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// A tensor of a manifest, by ranges of its row-major order.
class StoredSource : public Source {
 public:
  StoredSource(std::shared_ptr<const Manifest> manifest, const Tensor& tensor)
      : manifest_(std::move(manifest)), tensor_(tensor), reader_(*manifest_) {}

  Status do_read(uint64_t first, uint64_t count, void* out) override {
    auto* to = static_cast<char*>(out);
    for (const Box& box : boxes_of_range(tensor_.shape, first, first + count)) {
      RETURN_IF_ERROR(reader_.read(tensor_, box, to));
      to += volume(box.shape) * static_cast<uint64_t>(tensor_.dtype->bytes);
    }
    // A document has many tensors, which are read one after the other.
    if (first + count == volume(tensor_.shape)) reader_.forget();
    return fine();
  }

 private:
  std::shared_ptr<const Manifest> manifest_;
  const Tensor& tensor_;
  TensorReader reader_;
};

/// Row-major values of a record.
class RecordSource : public Source {
 public:
  RecordSource(std::shared_ptr<const Manifest> manifest, Payload payload, std::string what)
      : manifest_(std::move(manifest)), payload_(std::move(payload)), what_(std::move(what)) {}
  Status do_read(uint64_t first, uint64_t count, void* out) override {
    const auto width = static_cast<uint64_t>(payload_.dtype->bytes);
    return manifest_->container->reader().read(payload_.record, (payload_.first + first) * width,
                                               out, count * width, what_);
  }

 private:
  std::shared_ptr<const Manifest> manifest_;
  Payload payload_;
  std::string what_;
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
    part.chunks.push_back({Shape(payload.shape.size(), 0), payload.shape, t.chunks[0].extent});
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

std::shared_ptr<Source> source_of(std::shared_ptr<const Manifest> manifest, Payload payload,
                                  std::string what) {
  return std::make_shared<RecordSource>(std::move(manifest), std::move(payload), std::move(what));
}

Status Document::finish() const {
  if (manifest != nullptr) RETURN_IF_ERROR(manifest->container->reader().finish());
  for (const auto& other : others) RETURN_IF_ERROR(other->container->reader().finish());
  return fine();
}

std::vector<std::string> Document::sources() const {
  std::vector<std::string> out;
  if (manifest != nullptr) out.push_back(manifest->path);
  for (const auto& other : others) out.push_back(other->path);
  return out;
}

uint64_t Document::unchecked() const {
  uint64_t n = manifest == nullptr ? 0 : manifest->container->reader().unchecked();
  for (const auto& other : others) n += other->container->reader().unchecked();
  return n;
}

namespace {

/// A blob that is not a plain value may be anything that Python pickles, but it must be whole.
Status check_opaque(const Manifest& manifest, const Blob& blob) {
  std::vector<FileExtent> items = {blob.extent};
  items.insert(items.end(), blob.more.begin(), blob.more.end());
  for (const FileExtent& item : items) {
    const std::string what =
        manifest.container->files().shown(item.file) + ": " + printable(blob.name);
    ASSIGN_OR_RETURN(records, manifest.container->records(item, what));
    for (const Record& r : records)
      RETURN_IF_ERROR(manifest.container->reader().read_all(
          r, 1u << 20, what, [](const char*, uint64_t) { return fine(); }));
  }
  return fine();
}

/// Whether an item of a DCP tensor is a tensor subclass: items of another size than the values tell
/// are looked into.
Result<bool> is_subclass(const Manifest& manifest, const Tensor& t, const Chunk& c) {
  const uint64_t bytes = volume(c.shape) * static_cast<uint64_t>(t.dtype->bytes);
  // A large one's length tells: codes and scales take another part of the values' bytes.
  if (c.extent.transform == 0 && bytes >= 1u << 16 && c.extent.length >= bytes + 512 &&
      c.extent.length <= bytes + 4096)
    return false;
  ASSIGN_OR_RETURN(seen, manifest.container->seems_subclass(t, c));
  if (!seen) return false;
  ASSIGN_OR_RETURN(stored, manifest.container->stored(t, c));
  return !stored.cls.empty();
}

/// Whether any item of a DCP tensor is one. Libraries keep small parts plain, so the first tells
/// nothing of the others; but parts of one shape are kept in one way, so one of each is enough.
constexpr size_t kShapes = 8;
Result<bool> has_subclass(const Manifest& manifest, const Tensor& t) {
  std::vector<const Shape*> seen;
  for (const Chunk& c : t.chunks) {
    const auto same = [&](const Shape* shape) { return *shape == c.shape; };
    if (std::ranges::any_of(seen, same)) continue;
    ASSIGN_OR_RETURN(subclass, is_subclass(manifest, t, c));
    if (subclass) return true;
    if (seen.size() < kShapes) seen.push_back(&c.shape);
  }
  return false;
}

}  // namespace

Result<Document> document_of(std::shared_ptr<const Manifest> manifest) {
  Document out;
  out.manifest = manifest;
  out.dicts = manifest->dicts;
  std::vector<size_t> order = manifest->order;
  if (order.empty()) {
    order.resize(manifest->tensors.size() + manifest->blobs.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  }
  out.leaves.reserve(order.size());
  for (const size_t i : order) {
    Leaf leaf;
    if (i < manifest->tensors.size()) {
      const Tensor& t = manifest->tensors[i];
      leaf.path = t.path;
      leaf.dtype = t.dtype;
      leaf.shape = t.shape;
      leaf.stored = &t;
      if (manifest->kind == ContainerKind::kDcp) {
        ASSIGN_OR_RETURN(subclass, has_subclass(*manifest, t));
        if (!subclass) leaf.source = source_of(manifest, t);
      } else {
        ASSIGN_OR_RETURN(stored, manifest->container->stored(t, t.chunks[0]));
        if (stored.cls.empty()) {
          leaf.source = source_of(manifest, t);
        } else {
          add_parts(leaf, manifest, t, std::move(stored));
        }
      }
    } else {
      const Blob& b = manifest->blobs[i - manifest->tensors.size()];
      leaf.path = b.path;
      leaf.blob = &b;
      const auto value = b.value ? Result<Value>(*b.value) : manifest->container->value(b);
      leaf.kind =
          value.ok() && !value.value().is_opaque() ? Leaf::Kind::kValue : Leaf::Kind::kOpaque;
      if (value.ok()) {
        leaf.value = value.value();
      } else {
        if (value.error().cause == Cause::kTooLarge) leaf.too_large = value.error().text;
        RETURN_IF_ERROR(check_opaque(*manifest, b));
      }
    }
    out.leaves.push_back(std::move(leaf));
  }
  return out;
}

Error unwritable(const Leaf& leaf) {
  const std::string what = printable(leaf.name()) + ": ";
  if (!leaf.too_large.empty())
    return too_large(what + "is only kept by a directory, because it is too large to read: " +
                     leaf.too_large + "; --exclude leaves it out");
  return bad(what +
             "is a pickled object that is not a plain value, which only a directory can keep; "
             "--exclude leaves it out");
}

Status for_elements(const Leaf& leaf, uint64_t begin, uint64_t end, uint64_t limit,
                    const std::function<Status(const char*, uint64_t, uint64_t)>& use) {
  const auto width = static_cast<uint64_t>(leaf.dtype->bytes);
  const uint64_t at_once = std::max<uint64_t>(1, limit / width);
  if (leaf.source == nullptr)
    return failed(printable(leaf.name()) +
                  ": is a tensor subclass, which only its own dialect can read");
  std::string buffer;
  for (uint64_t at = begin; at < end; at += at_once) {
    const uint64_t count = std::min(at_once, end - at);
    buffer.resize(count * width);
    RETURN_IF_ERROR(leaf.source->read(at, count, buffer.data()));
    RETURN_IF_ERROR(use(buffer.data(), at, count));
  }
  return fine();
}

}  // namespace lowbit::ckpt
