// One part of a DCP directory that several processes write.
#include <nlohmann/json.hpp>

#include "container/dcp/dcp.h"
#include "container/dcp/dcp_writer.h"
#include "container/dcp/digests.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

using Json = nlohmann::json;

/// [tensor, chunk, digest], or with [..., cells down, across, their digits].
Json said_of(size_t tensor, size_t chunk, const ChunkDigest& digest) {
  Json out = {tensor, chunk, digest.whole};
  if (!digest.tiles.empty())
    for (const Json& more : {Json(digest.grid.down), Json(digest.grid.across), Json(digest.tiles)})
      out.push_back(more);
  return out;
}

}  // namespace

std::vector<uint64_t> DcpWriter::owners() const {
  std::vector<uint64_t> bytes(to_.file_names.size(), 1);
  uint64_t all = bytes.size(), before = 0;
  for (const Tensor& t : to_.tensors) {
    for (const Chunk& c : t.chunks) {
      bytes[c.extent.file] += c.extent.length;
      all += c.extent.length;
    }
  }
  const uint64_t parts = options_.part->count;
  std::vector<uint64_t> out;
  for (const uint64_t n : bytes) {
    const double middle =
        (static_cast<double>(before) + static_cast<double>(n) / 2) / static_cast<double>(all);
    out.push_back(std::min(parts - 1, static_cast<uint64_t>(middle * static_cast<double>(parts))));
    before += n;
  }
  return out;
}

Result<std::string> DcpWriter::plan_text() const {
  std::string files;
  const auto add = [&](const Manifest& source) {
    FileSet& set = source.container->files();
    for (uint32_t i = 0; i < source.file_names.size(); ++i) {
      const FileIdentity is = set.identity(i);
      files += source.file_names[i] + '\0' + std::to_string(is.size) + ' ' +
               std::to_string(is.seconds) + ' ' + std::to_string(is.nanoseconds) + is.version +
               '\n';
    }
  };
  if (from_.manifest != nullptr) add(*from_.manifest);
  for (const auto& other : from_.others) add(*other);
  return std::string("lowbit-ckpt " LOWBIT_VERSION "\nparts ") +
         std::to_string(options_.part->count) + "\ndigests " + (options_.manifest ? "yes" : "no") +
         "\nlayout " + digest_of(metadata_bytes(to_, "")) + "\nsource " + digest_of(files) + "\n" +
         (options_.part_plan.empty() ? "" : "options " + digest_of(options_.part_plan) + "\n");
}

std::string DcpWriter::said() const {
  Json chunks = Json::array();
  for (size_t t = 0; t < to_.tensors.size(); ++t) {
    for (size_t c = 0; c < to_.tensors[t].chunks.size(); ++c) {
      if (files_[to_.tensors[t].chunks[c].extent.file] != nullptr)
        chunks.push_back(said_of(t, c, digests_[t][c]));
    }
  }
  return Json{{"chunks", chunks}, {"unchecked", from_.unchecked()}}.dump();
}

Status DcpWriter::hear(const std::string& said) {
  const Json j = Json::parse(said, nullptr, false);
  const auto whole = [](const Json& n) { return n.is_number_unsigned(); };
  bool sound = j.is_object() && j.contains("chunks") && j["chunks"].is_array() &&
               whole(j.value("unchecked", Json()));
  for (size_t i = 0; sound && i < j["chunks"].size(); ++i) {
    const Json& c = j["chunks"][i];
    sound = c.is_array() && (c.size() == 3 || c.size() == 6) && whole(c[0]) && whole(c[1]) &&
            c[2].is_string() && c[0].get<uint64_t>() < digests_.size() &&
            c[1].get<uint64_t>() < digests_[c[0].get<uint64_t>()].size();
    if (!sound) break;
    ChunkDigest& digest = digests_[c[0].get<uint64_t>()][c[1].get<uint64_t>()];
    digest.whole = c[2].get<std::string>();
    if (c.size() == 3) continue;
    sound = whole(c[3]) && whole(c[4]) && c[5].is_string();
    if (!sound) break;
    digest.grid.down = c[3];
    digest.grid.across = c[4];
    digest.tiles = c[5];
  }
  if (!sound) return bad("a part does not say what lowbit-ckpt writes: start all parts again");
  report_.unchecked += j["unchecked"].get<uint64_t>();
  return fine();
}

Status DcpWriter::check_parts(SharedDirectory& folder) const {
  std::vector<uint64_t> ends(to_.file_names.size(), 0);
  ends[0] = values_end_;
  for (size_t t = 0; t < to_.tensors.size(); ++t) {
    for (size_t c = 0; c < to_.tensors[t].chunks.size(); ++c) {
      const FileExtent& extent = to_.tensors[t].chunks[c].extent;
      ends[extent.file] = std::max(ends[extent.file], extent.offset + extent.length);
      if (digests_[t][c].whole.empty())
        return folder.incomplete("no part has a digest of " + to_.tensors[t].name);
    }
  }
  for (size_t f = 0; f < ends.size() && !folder.published(); ++f)
    RETURN_IF_ERROR(folder.check_file(to_.file_names[f], ends[f]));
  return fine();
}

Result<WriteReport> DcpWriter::write_part(const std::string& path) {
  const Part part = *options_.part;
  files_.resize(to_.file_names.size());
  // Where items lie depends on the sizes of values, which are small: every part reads them.
  RETURN_IF_ERROR(write_values(nullptr));
  place_items();
  ASSIGN_OR_RETURN(plan, plan_text());
  ASSIGN_OR_RETURN(folder, SharedDirectory::open(path, plan, from_.sources()));
  pieces_ = folder->path();
  ASSIGN_OR_RETURN(done, folder->part(part.number));
  if (!done && !folder->published()) {
    const std::vector<uint64_t> owner = owners();
    for (size_t f = 0; f < owner.size(); ++f) {
      if (owner[f] != part.number) continue;
      ASSIGN_OR_RETURN(file, folder->file(to_.file_names[f]));
      files_[f] = std::move(file);
    }
    total_ = 0;
    for (const Tensor& t : to_.tensors) {
      for (const Chunk& c : t.chunks) {
        if (files_[c.extent.file] != nullptr)
          total_ += volume(c.shape) * static_cast<uint64_t>(t.dtype->bytes);
      }
    }
    if (files_[0] != nullptr) RETURN_IF_ERROR(write_values(files_[0]));
    place_items();
    RETURN_IF_ERROR(write_tensors());
    RETURN_IF_ERROR(folder->complete(part.number, said()));
  }
  for (uint64_t i = 0; i < part.count && !folder->published(); ++i) {
    ASSIGN_OR_RETURN(said, folder->part(i));
    if (said) {
      RETURN_IF_ERROR(hear(*said));
    } else {
      report_.missing.push_back(i);
    }
  }
  if (!folder->published() && !report_.missing.empty()) {
    report_.published = false;
    return report_;
  }
  report_.missing.clear();
  if (!folder->published()) RETURN_IF_ERROR(check_parts(*folder));
  const std::string metadata = metadata_bytes(to_, folder->name());
  if (options_.manifest)
    RETURN_IF_ERROR(folder->add("lowbit.json", [&](Output& out) {
      return write_digests(out, to_, digest_of(metadata), digests_, value_digests_);
    }));
  RETURN_IF_ERROR(folder->add(".metadata", [&](Output& out) { return out.write(metadata); }));
  RETURN_IF_ERROR(folder->publish());
  return report_;
}

}  // namespace lowbit::ckpt
