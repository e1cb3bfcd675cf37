#include "container/dcp/recorded.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "container/dcp/digests.h"
#include "container/dcp/tiles.h"
#include "container/manifest/record_reader.h"
#include "io/hash.h"
#include "io/read/file.h"
#include "io/read/open.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kFiner = 16u << 20;  // bytes of grids with more cells than those of lowbit
constexpr const char* kName = "lowbit.json";

/// {"name": "digest", ...}
std::optional<std::map<std::string, std::string>> texts(const nlohmann::json& object) {
  if (!object.is_object()) return std::nullopt;
  std::map<std::string, std::string> out;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string()) return std::nullopt;
    out.emplace(key, value.get<std::string>());
  }
  return out;
}

/// {"chunk": [down, across, "digits"], ...}
std::optional<std::map<std::string, Recorded::Tiles>> tiles_of(const nlohmann::json& object) {
  if (!object.is_object()) return std::nullopt;
  std::map<std::string, Recorded::Tiles> out;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_array() || value.size() != 3 || !value[0].is_number_unsigned() ||
        !value[1].is_number_unsigned() || !value[2].is_string())
      return std::nullopt;
    Recorded::Tiles tiles{value[0], value[1], value[2]};
    constexpr uint64_t kMaxCells = 1u << 16;
    if (tiles.down == 0 || tiles.across == 0 || tiles.down > kMaxCells ||
        tiles.across > kMaxCells || tiles.digits.size() != tiles.down * tiles.across * kTileDigits)
      return std::nullopt;
    out.emplace(key, std::move(tiles));
  }
  return out;
}

std::optional<Recorded::Entry> entry_of(const nlohmann::json& j) {
  if (!j.is_object() || !j.contains("dtype") || !j["dtype"].is_string() || !j.contains("shape") ||
      !j["shape"].is_array() || !j.contains("chunks"))
    return std::nullopt;
  Recorded::Entry out;
  out.dtype = j["dtype"].get<std::string>();
  for (const nlohmann::json& size : j["shape"]) {
    if (!size.is_number_integer()) return std::nullopt;
    out.shape.push_back(size.get<int64_t>());
  }
  auto chunks = texts(j["chunks"]);
  if (!chunks) return std::nullopt;
  out.chunks = std::move(*chunks);
  if (j.contains("tiles")) {
    auto tiles = tiles_of(j["tiles"]);
    if (!tiles) return std::nullopt;
    out.tiles = std::move(*tiles);
  }
  return out;
}

}  // namespace

Result<std::string> value_digest(const Manifest& manifest, const Blob& blob) {
  constexpr uint64_t kPiece = 1u << 20;
  Hash hash;
  std::string buffer;
  const auto add = [&](const FileExtent& extent) -> Status {
    ASSIGN_OR_RETURN(file, manifest.container->files().open(extent.file));
    for (uint64_t at = 0; at < extent.length; at += buffer.size()) {
      buffer.resize(std::min(kPiece, extent.length - at));
      RETURN_IF_ERROR(file->read(extent.offset + at, buffer.data(), buffer.size()));
      hash.add(buffer.data(), buffer.size());
    }
    return fine();
  };
  RETURN_IF_ERROR(add(blob.extent));
  for (const FileExtent& extent : blob.more) RETURN_IF_ERROR(add(extent));
  return hash.hex();
}

Result<std::optional<Recorded>> read_recorded(const Manifest& manifest) {
  std::optional<Recorded> out;
  if (manifest.kind != ContainerKind::kDcp) return out;
  ASSIGN_OR_RETURN(folder, open_folder(manifest.path));
  if (!folder->has(kName)) return out;
  const std::string what = printable(manifest.path + "/" + kName);
  const char* remedy = "remove it to go by the checksums of the items";
  auto text = folder->content(kName, max_digests(manifest) + kFiner);
  if (!text.ok() && text.error().cause == Cause::kTooLarge)
    return too_large(text.error().text + " for this checkpoint; " + remedy);
  if (!text.ok()) return text.error();
  const nlohmann::json j = nlohmann::json::parse(text.value(), nullptr, false);
  const auto unknown = [&] {
    return bad(what + ": is not laid out as lowbit-ckpt does; remove it to verify without digests");
  };
  if (j.is_object() && j.value("digest", nlohmann::json(kDigestKind)) != kDigestKind)
    return bad(what + ": its digests are not of the kind " + kDigestKind +
               ", which alone is known here; remove it to verify without digests");
  if (!j.is_object() || j.value("version", nlohmann::json()) != 1 || !j.contains("tensors") ||
      !j["tensors"].is_object())
    return unknown();
  if (j.contains("metadata") && j["metadata"] != manifest.metadata_digest)
    return bad(what +
               ": is of another .metadata than lies beside it: another program has written "
               "this directory since, or .metadata is damaged; " +
               remedy)
        .at("", kName);
  out.emplace();
  for (const auto& [name, value] : j["tensors"].items()) {
    auto entry = entry_of(value);
    if (!entry) return unknown();
    out->tensors.emplace(name, std::move(*entry));
  }
  if (j.contains("values")) {
    auto values = texts(j["values"]);
    if (!values) return unknown();
    out->values = std::move(values);
  }
  return out;
}

}  // namespace lowbit::ckpt
