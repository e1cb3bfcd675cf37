#include "container/dcp/digests.h"

#include <nlohmann/json.hpp>

#include "io/text.h"

namespace lowbit::ckpt {

std::string chunk_key(const Shape& offset) {
  std::string key;
  for (const int64_t o : offset) key += (key.empty() ? "" : ",") + std::to_string(o);
  return key;
}

Status write_digests(Output& out, const Manifest& manifest, const std::string& metadata,
                     const std::vector<std::vector<ChunkDigest>>& chunks_of_tensors,
                     const std::vector<std::string>& values) {
  using Json = nlohmann::ordered_json;
  const auto text = [](const Json& j) {
    return j.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  RETURN_IF_ERROR(out.write("{\"version\": 1, \"tool\": " + text("lowbit-ckpt " LOWBIT_VERSION) +
                            ", \"digest\": " + text(kDigestKind) +
                            ", \"metadata\": " + text(metadata) + ",\n\"tensors\": {"));
  bool first = true;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const Tensor& t = manifest.tensors[i];
    if (!is_utf8(t.name, false)) continue;  // JSON has no such names
    Json chunks = Json::object(), tiles = Json::object();
    for (size_t c = 0; c < t.chunks.size(); ++c) {
      const ChunkDigest& said = chunks_of_tensors[i][c];
      const std::string key = chunk_key(t.chunks[c].offset);
      chunks[key] = said.whole;
      if (!said.tiles.empty()) tiles[key] = {said.grid.down, said.grid.across, said.tiles};
    }
    Json entry = {{"dtype", t.dtype->name}, {"shape", t.shape}, {"chunks", chunks}};
    if (!tiles.empty()) entry["tiles"] = tiles;
    RETURN_IF_ERROR(out.write((first ? "\n" : ",\n") + text(t.name) + ": " + text(entry)));
    first = false;
  }
  RETURN_IF_ERROR(out.write("},\n\"values\": {"));
  first = true;
  for (size_t i = 0; i < manifest.blobs.size(); ++i) {
    if (!is_utf8(manifest.blobs[i].name, false)) continue;
    RETURN_IF_ERROR(
        out.write((first ? "\n" : ",\n") + text(manifest.blobs[i].name) + ": " + text(values[i])));
    first = false;
  }
  RETURN_IF_ERROR(out.write("}}\n"));
  return out.close();
}

uint64_t max_digests(const Manifest& manifest) {
  constexpr uint64_t kLetter = 6;   // bytes of JSON for a byte of a name, as \u0001
  constexpr uint64_t kNumber = 22;  // of a size or an offset, with what parts it from the next
  constexpr uint64_t kElse = 256;   // of an entry's own keys, and of a digest
  uint64_t bytes = kElse;
  for (const Tensor& t : manifest.tensors) {
    const uint64_t place = kNumber * t.shape.size();
    bytes += kLetter * t.name.size() + place + kElse;
    for (const Chunk& c : t.chunks) {
      const auto width = static_cast<uint64_t>(t.dtype->bytes);
      const TileGrid grid = tile_grid(c.shape, width);
      // A chunk that cannot lie in its item has no cells.
      const bool fits = volume(c.shape) * width <= c.extent.length;
      bytes += 2 * place + kElse + (fits ? grid.down * grid.across * kTileDigits : 0);
    }
  }
  for (const Blob& b : manifest.blobs)
    bytes += kLetter * b.name.size() + 2 * kElse * (1 + b.more.size());
  return bytes;
}

}  // namespace lowbit::ckpt
