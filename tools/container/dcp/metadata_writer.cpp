// A manifest to `.metadata`.
#include <cstdint>
#include <string_view>

#include "container/dcp/dcp.h"
#include "container/dcp/key_kinds.h"
#include "io/text.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

/// A path as Python has it: bytes that are not UTF-8 are lone surrogates, U+DC80 to U+DCFF. torch
/// reads no other.
std::string python_path(std::string_view path) {
  constexpr size_t kLongest = 4;  // bytes of a character
  std::string out;
  while (!path.empty()) {
    size_t length = 1;
    while (length <= kLongest && !is_utf8(path.substr(0, length), false)) ++length;
    if (length <= kLongest) {
      out += path.substr(0, length);
    } else {
      const auto byte = static_cast<uint8_t>(path[0]);
      out += {'\xed', static_cast<char>(0xb0 | byte >> 6), static_cast<char>(0x80 | (byte & 0x3f))};
      length = 1;
    }
    path.remove_prefix(length);
  }
  return out;
}

/// Writes the metadata's objects. Lists and dicts are written in one piece.
class MetadataWriter {
 public:
  explicit MetadataWriter(const Manifest& m) : m_(m) {}

  std::string write(const std::string& path) {
    object("Metadata");
    w_.text("state_dict_metadata").empty_dict().mark();
    for (const Tensor& t : m_.tensors) tensor(t);
    for (const Blob& b : m_.blobs) w_.text(b.name).global(kModule, "BytesStorageMetadata").object();
    w_.set_items();
    w_.text("planner_data");
    paths();
    w_.text("storage_data").empty_dict().mark();
    for (const Tensor& t : m_.tensors) {
      for (size_t i = 0; i < t.chunks.size(); ++i) {
        object("MetadataIndex")
            .text("fqn")
            .text(t.name)
            .text("index")
            .integer(static_cast<int64_t>(i));
        w_.text("offset");
        size(t.chunks[i].offset);
        done();
        write_extent(t.chunks[i].extent);
      }
    }
    for (const Blob& b : m_.blobs) {
      object("MetadataIndex").text("fqn").text(b.name).text("index").none();
      done();
      write_extent(b.extent);
    }
    w_.set_items();
    w_.text("storage_meta");
    object("StorageMeta").text("checkpoint_id").text(python_path(path));
    w_.text("save_id").none();
    w_.text("load_id").none().text("modules").empty_list();
    done();
    w_.text("version").text("1.0.0");
    key_kinds();
    done();
    return w_.finish();
  }

 private:
  PickleWriter& object(std::string_view cls) {
    return w_.global(kModule, cls).object().empty_dict().mark();
  }
  void done() { w_.set_items().build(); }
  void size(const Shape& s) { w_.global("torch", "Size").integers(s).tuple(1).call(); }

  void tensor(const Tensor& t) {
    w_.text(t.name);
    object("TensorStorageMetadata").text("properties");
    // Five properties: torch 2.11 to 2.14 cannot read the sixth of 2.15, which reads five.
    w_.global(kModule, "TensorProperties").object().mark().global("torch", t.dtype->name);
    w_.global("torch.serialization", "_get_layout").text("torch.strided").tuple(1).call();
    w_.boolean(false).global(kModule, "_MEM_FORMAT_ENCODING").integer(0).tuple(1).call();
    w_.boolean(false).tuple(5).build();
    w_.text("size");
    size(t.shape);
    w_.text("chunks").empty_list().mark();
    for (const Chunk& c : t.chunks) {
      object("ChunkStorageMetadata").text("offsets");
      size(c.offset);
      w_.text("sizes");
      size(c.shape);
      done();
    }
    w_.appends();
    done();
  }

  void write_extent(const FileExtent& p) {
    w_.global("torch.distributed.checkpoint.filesystem", "_StorageInfo").object().empty_dict();
    w_.mark().text("relative_path").text(m_.file_names[p.file]);
    w_.text("offset").integer(static_cast<int64_t>(p.offset));
    w_.text("length").integer(static_cast<int64_t>(p.length));
    done();
  }

  void paths() {
    if (!m_.has_paths) {
      w_.none();
      return;
    }
    w_.empty_dict();
    if (m_.tensors.empty() && m_.blobs.empty()) return;
    w_.mark();
    const auto write = [&](const std::string& name, const Path& path) {
      w_.text(name);
      if (path.size() > 3) w_.mark();
      for (size_t i = 0; i < path.size(); ++i) {
        if (KeyKinds::written_as_number(path, i)) {
          w_.integer(path[i].number);
        } else {
          w_.text(path[i].text());
        }
      }
      w_.tuple(path.size());
    };
    for (const Tensor& t : m_.tensors) write(t.name, t.path);
    for (const Blob& b : m_.blobs) write(b.name, b.path);
    w_.set_items();
  }

  void key_kinds() {
    if (!m_.has_paths) return;
    KeyKinds kinds;
    // Keys that cannot be told apart were refused before anything was written.
    for (const Tensor& t : m_.tensors) static_cast<void>(kinds.add(t.path));
    for (const Blob& b : m_.blobs) static_cast<void>(kinds.add(b.path));
    // That there is no number is told too, but not of what a directory of torch did not tell.
    if (kinds.empty() && !m_.tells_keys) return;
    w_.text(KeyKinds::kEntry);
    write_value(w_, kinds.value());
  }

  const Manifest& m_;
  PickleWriter w_{4};
};

}  // namespace

std::string metadata_bytes(const Manifest& manifest, const std::string& path) {
  return MetadataWriter(manifest).write(path);
}

}  // namespace lowbit::ckpt
