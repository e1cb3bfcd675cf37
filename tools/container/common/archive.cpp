#include "container/common/archive.h"

#include "io/read/open.h"
#include "io/text.h"

namespace lowbit::ckpt {

Result<std::shared_ptr<Archive>> Archive::open(const std::string& path) {
  ASSIGN_OR_RETURN(named, folder_around(path));
  std::shared_ptr<Archive> out(new Archive(named.folder, path));
  out->what_ = printable(path);
  RETURN_IF_ERROR(out->files_.add(named.name));
  return out;
}

Result<std::shared_ptr<Archive>> Archive::open(std::shared_ptr<Directory> folder,
                                               const std::string& name) {
  const std::string path = folder->path() + "/" + name;
  std::shared_ptr<Archive> out(new Archive(std::move(folder), path));
  out->what_ = printable(path);
  RETURN_IF_ERROR(out->files_.add_inner(name));
  return out;
}

Result<Stored> Archive::stored(const Tensor& tensor, const Chunk&) {
  const auto known = tensors_.find(tensor.name);
  if (known == tensors_.end()) return bad(what_ + ": has no tensor " + printable(tensor.name));
  return part_of(known->second, tensor, what_ + ": " + printable(tensor.name));
}

Result<Value> Archive::value(const Blob& blob) {
  if (blob.value) return *blob.value;
  return bad(what_ + ": " + printable(blob.name) + ": is not a plain value");
}

Result<std::vector<Record>> Archive::records(const FileExtent& extent, const std::string&) {
  std::vector<Record> out;
  for (const Record& r : records_) {
    if (r.offset >= extent.offset && r.offset - extent.offset <= extent.length &&
        r.size <= extent.length - (r.offset - extent.offset)) {
      out.push_back(r);
    }
  }
  return out;
}

Status Archive::add(Manifest& manifest, Tensor tensor, Stored stored) {
  tensor.name = flat_name(tensor.path);
  RETURN_IF_ERROR(names_.take(manifest, tensor.path, what_));
  uint64_t begin = UINT64_MAX, end = 0;
  for (const auto& [name, payload] : stored.parts) {
    begin = std::min(begin, payload.record.offset);
    end = std::max(end, payload.record.offset + payload.record.size);
  }
  tensor.chunks.push_back(
      {Shape(tensor.shape.size(), 0), tensor.shape, {0, 0, begin, end - begin}});
  tensors_.emplace(tensor.name, std::move(stored));
  manifest.tensors.push_back(std::move(tensor));
  return fine();
}

Status Archive::add(Manifest& manifest, Path path, Value value) {
  return names_.add(manifest, std::move(path), std::move(value), what_);
}

void Archive::finish(std::shared_ptr<Archive> self, ContainerKind kind, Manifest& manifest) {
  names_.clear();
  manifest.kind = kind;
  manifest.path = path_;
  manifest.file_names = {files_.name(0)};
  manifest.has_paths = true;
  manifest.container = std::move(self);
}

}  // namespace lowbit::ckpt
