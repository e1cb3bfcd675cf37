#include "container/deepspeed/parts.h"

#include <algorithm>
#include <cstring>

#include "container/common/archive.h"
#include "container/common/open.h"
#include "container/manifest/ranges.h"
#include "container/manifest/record_reader.h"
#include "container/manifest/tiling.h"
#include "io/read/open.h"
#include "io/text.h"

namespace lowbit::ckpt {

FileLeaf PartFile::find(const Path& path) const {
  for (const FileLeaf& leaf : leaves_) {
    if (*leaf.path == path) return leaf;
  }
  return {};
}

bool PartFile::has_below(const Path& path) const {
  return std::ranges::any_of(leaves_,
                             [&](const FileLeaf& leaf) { return is_below(*leaf.path, path); });
}

Status PartFile::for_below(const Path& path,
                           const std::function<Status(const Path&, const FileLeaf&)>& use) const {
  for (const FileLeaf& leaf : leaves_) {
    if (!is_below(*leaf.path, path)) continue;
    RETURN_IF_ERROR(
        use(Path(leaf.path->begin() + static_cast<std::ptrdiff_t>(path.size()), leaf.path->end()),
            leaf));
  }
  return fine();
}

Result<Payload> PartFile::payload(const Tensor& tensor) const {
  ASSIGN_OR_RETURN(stored, manifest_.container->stored(tensor, tensor.chunks[0]));
  if (!stored.cls.empty())
    return bad(what_ + ": " + printable(tensor.name) + " is a " + printable(stored.cls) +
               ", which DeepSpeed does not cut into ranks' slices");
  Payload out = std::move(stored.parts[0].second);
  out.record.file = file_;
  return out;
}

Result<double> PartFile::number(const Tensor& tensor) const {
  const std::string what = what_ + ": " + printable(tensor.name);
  if (volume(tensor.shape) != 1) return bad(what + " is not a number");
  ASSIGN_OR_RETURN(stored, manifest_.container->stored(tensor, tensor.chunks[0]));
  if (!stored.cls.empty()) return bad(what + " is not a number");
  const Payload& from = stored.parts[0].second;
  char bytes[8] = {};
  const auto width = static_cast<uint64_t>(from.dtype->bytes);
  if (width > sizeof bytes) return bad(what + " is not a number");
  RETURN_IF_ERROR(
      manifest_.container->reader().read(from.record, from.first * width, bytes, width, what));
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, bytes, sizeof x);
    return static_cast<double>(x);
  };
  const std::string_view dtype = from.dtype->name;
  if (dtype == "float32") return as(float{});
  if (dtype == "float64") return as(double{});
  if (dtype == "int64") return as(int64_t{});
  if (dtype == "int32") return as(int32_t{});
  return bad(what + " is a number of dtype " + std::string(dtype));
}

Result<std::shared_ptr<Parts>> Parts::open(const std::string& path) {
  ASSIGN_OR_RETURN(folder, open_folder(path));
  std::shared_ptr<Parts> out(new Parts(std::move(folder), path));
  out->what_ = printable(path);
  return out;
}

Result<std::shared_ptr<const PartFile>> Parts::read(const std::string& name) {
  const auto out = std::make_shared<PartFile>();
  out->file_ = static_cast<uint32_t>(files_.count());
  RETURN_IF_ERROR(files_.add_inner(name));
  ASSIGN_OR_RETURN(archive, Archive::open(folder_, name));
  if (archive->files().identity(0) != files_.identity(out->file_))
    return bad(archive->what() + ": changed while it was read");
  out->what_ = archive->what();
  ASSIGN_OR_RETURN(manifest, read_torch_zip(archive));
  out->manifest_ = std::move(manifest);
  const Manifest& m = out->manifest_;
  for (const size_t i : m.order) {
    if (i < m.tensors.size()) {
      out->leaves_.push_back({&m.tensors[i].path, &m.tensors[i], nullptr});
    } else {
      const Blob& blob = m.blobs[i - m.tensors.size()];
      out->leaves_.push_back({&blob.path, nullptr, &*blob.value});
    }
  }
  return std::shared_ptr<const PartFile>(out);
}

Result<Stored> Parts::stored(const Tensor& tensor, const Chunk& chunk) {
  const auto known = payloads_.find(tensor.name);
  if (known != payloads_.end()) {
    const auto at =
        std::lower_bound(known->second.begin(), known->second.end(), chunk.offset,
                         [](const auto& held, const Shape& offset) { return held.first < offset; });
    if (at != known->second.end() && at->first == chunk.offset) {
      Stored out;
      out.parts.emplace_back("", at->second);
      return out;
    }
  }
  return bad(what_ + ": has no tensor " + printable(tensor.name));
}

Result<Value> Parts::value(const Blob& blob) {
  if (blob.value && !blob.value->is_opaque()) return *blob.value;
  return bad(what_ + ": " + printable(blob.name) +
             ": is opaque: " + (blob.value ? opaque_names(*blob.value) : "no plain value") +
             ", which torch would import and run; nothing was executed. verify --opaque lets it "
             "pass, and " +
             (blob.value && blob.value->holds_tensor() ? "--exclude" : "convert") +
             " leaves it out");
}

Result<std::vector<Record>> Parts::records(const FileExtent& extent, const std::string& what) {
  for (const auto& [name, held] : payloads_) {
    for (const auto& [offset, payload] : held) {
      const Record& r = payload.record;
      if (r.file == extent.file && r.offset == extent.offset && r.size == extent.length)
        return std::vector<Record>{r};
    }
  }
  return bad(what + ": has no record there");
}

Status Parts::add(Manifest& manifest, Tensor tensor, std::vector<Payload> payloads) {
  tensor.name = flat_name(tensor.path);
  RETURN_IF_ERROR(names_.take(manifest, tensor.path, what_));
  auto& held = payloads_[tensor.name];
  for (size_t i = 0; i < payloads.size(); ++i) {
    const Record& r = payloads[i].record;
    tensor.chunks[i].extent = {r.file, 0, r.offset, r.size};
    held.emplace_back(tensor.chunks[i].offset, std::move(payloads[i]));
  }
  RETURN_IF_ERROR(check_tiling(tensor));
  manifest.order.push_back(manifest.tensors.size());
  manifest.tensors.push_back(std::move(tensor));
  return fine();
}

Status Parts::add(Manifest& manifest, Path path, const Payload& from, const Shape& shape) {
  if (from.shape != shape) {
    const Slice all{from, 0, 0, volume(from.shape)};
    return add(manifest, std::move(path), std::vector<Slice>{all}, shape);
  }
  Tensor tensor{{}, std::move(path), from.dtype, shape, {}};
  tensor.chunks.push_back({Shape(shape.size(), 0), shape, {}});
  return add(manifest, std::move(tensor), {from});
}

Status Parts::add(Manifest& manifest, Path path, const std::vector<Slice>& slices,
                  const Shape& shape) {
  Tensor tensor{{}, std::move(path), nullptr, shape, {}};
  const std::string what = what_ + ": " + printable(flat_name(tensor.path));
  ASSIGN_OR_RETURN(total, elements(shape, what));
  std::vector<Payload> payloads;
  const Shape strides = row_major(shape);
  uint64_t end = 0;
  for (const Slice& slice : slices) {
    const Payload& from = slice.from;
    const std::string file = files_.name(from.record.file);
    if (from.shape.size() != 1 || (from.shape[0] > 1 && from.stride[0] != 1))
      return bad(what + ": is not a flat vector in " + file);
    const uint64_t held = volume(from.shape);
    if (slice.first > held || slice.count > held - slice.first)
      return bad(what + ": its slice in " + file + " is elements " + std::to_string(slice.first) +
                 " to " + std::to_string(slice.first + slice.count) + " of a vector of " +
                 std::to_string(held));
    if (slice.at != end || slice.count > total - end)
      return bad(what + ": the slice in " + file + " reaches beyond its " + std::to_string(total) +
                 " elements");
    if (tensor.dtype != nullptr && tensor.dtype != from.dtype)
      return bad(what + ": is " + tensor.dtype->name + " in some files and " + from.dtype->name +
                 " in " + file);
    tensor.dtype = from.dtype;
    end += slice.count;
    for (Box& box : boxes_of_range(shape, slice.at, end)) {
      const uint64_t first = position(box.offset, strides) - slice.at;
      payloads.push_back(
          {from.dtype, box.shape, strides, from.first + slice.first + first, from.record});
      tensor.chunks.push_back({std::move(box.offset), std::move(box.shape), {}});
    }
  }
  if (end != total || tensor.dtype == nullptr)
    return bad(what + ": the files hold " + std::to_string(end) + " of its " +
               std::to_string(total) + " elements " + shape_text(shape));
  if (total == 0) {  // a manifest's tensors have a chunk
    tensor.chunks.push_back({Shape(shape.size(), 0), shape, {}});
    payloads.push_back({tensor.dtype, shape, strides, 0, slices[0].from.record});
  }
  return add(manifest, std::move(tensor), std::move(payloads));
}

Status Parts::add(Manifest& manifest, Path path, Value value) {
  RETURN_IF_ERROR(names_.add(manifest, std::move(path), std::move(value), what_));
  blobs_.push_back(manifest.order.size());
  manifest.order.push_back(manifest.blobs.size() - 1);
  return fine();
}

Status Parts::add(Manifest& manifest, Path path, const PartFile& file, const FileLeaf& leaf) {
  if (leaf.value != nullptr) return add(manifest, std::move(path), *leaf.value);
  ASSIGN_OR_RETURN(payload, file.payload(*leaf.tensor));
  return add(manifest, std::move(path), payload, leaf.tensor->shape);
}

void Parts::finish(std::shared_ptr<Parts> self, ContainerKind kind, Manifest& manifest) {
  names_.clear();
  for (const size_t i : blobs_) manifest.order[i] += manifest.tensors.size();
  manifest.kind = kind;
  manifest.path = path_;
  for (uint32_t i = 0; i < files_.count(); ++i) manifest.file_names.push_back(files_.name(i));
  manifest.has_paths = true;
  manifest.container = std::move(self);
}

}  // namespace lowbit::ckpt
