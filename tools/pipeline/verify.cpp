#include <algorithm>
#include <mutex>
#include <optional>
#include <set>

#include "container/common/open.h"
#include "container/dcp/digests.h"
#include "container/dcp/recorded.h"
#include "container/dcp/tiles.h"
#include "container/dcp/value_archive.h"
#include "container/document/tree.h"
#include "container/manifest/record_reader.h"
#include "container/manifest/tensor_reader.h"
#include "dialect/common/dialect.h"
#include "dialect/numbers/numbers.h"
#include "io/hash.h"
#include "io/parallel.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/role.h"
#include "pipeline/select.h"
#include "pipeline/value_stats.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kVerifyPiece = 1u << 20;

/// One tensor: all of its values are read once, for the checksums of their records, for what is
/// recorded of them, and for what they are.
class TensorCheck {
 public:
  TensorCheck(const Document& document, const VerifyOptions& options)
      : document_(document), options_(options) {}

  /// `recorded`: the tensor's digests, null where there are none.
  Status check(const Leaf& leaf, const Recorded::Entry* recorded) {
    if (leaf.kind == Leaf::Kind::kSubclass) {
      for (const Leaf& part : leaf.parts)
        RETURN_IF_ERROR(dense(part, leaf.name() + "." + part.name()));
      return fine();
    }
    if (leaf.stored == nullptr || document_.manifest->kind != ContainerKind::kDcp)
      return dense(leaf, leaf.name());
    return chunks(*leaf.stored, recorded);
  }

  void find(const std::string& name, const std::string& what, const std::string& file = "") {
    Json finding{{"tensor", printable(name)}, {"what", what}};
    if (!file.empty()) finding["file"] = file;
    findings.push_back(std::move(finding));
  }

  std::vector<Json> findings;
  std::vector<std::string> warnings;
  uint64_t bytes = 0;

 private:
  Status dense(const Leaf& leaf, const std::string& name) {
    ValueStats value_stats;
    RETURN_IF_ERROR(for_elements(leaf, 0, volume(leaf.shape), kVerifyPiece,
                                 [&](const char* values, uint64_t first, uint64_t count) {
                                   take(*leaf.dtype, values, first, count, value_stats);
                                   return fine();
                                 }));
    bytes += leaf.bytes();
    judge(name, leaf.shape, *leaf.dtype, value_stats);
    return fine();
  }

  /// A tensor of a directory, chunk by chunk: a chunk is what has a digest, and what holds a
  /// subclass with parts of its own.
  Status chunks(const Tensor& tensor, const Recorded::Entry* recorded) {
    const Manifest& m = *document_.manifest;
    TensorReader reader(m);
    ValueStats whole;
    size_t tiled = 0;
    for (const Chunk& chunk : tensor.chunks) {
      ASSIGN_OR_RETURN(stored, m.container->stored(tensor, chunk));
      Hash hash;
      const Recorded::Tiles* cells = tiles_of(recorded, chunk);
      std::optional<TileHasher> tiles;
      if (cells != nullptr) {
        ++tiled;
        TileGrid grid = tile_grid(chunk.shape, static_cast<uint64_t>(tensor.dtype->bytes));
        grid.down = cells->down;
        grid.across = cells->across;
        tiles.emplace(grid, static_cast<uint64_t>(tensor.dtype->bytes));
      }
      for (const auto& [part, payload] : stored.parts) {
        ValueStats own;
        ValueStats& value_stats = part.empty() ? whole : own;
        if (!part.empty()) hash.add(part.c_str(), part.size() + 1);
        RETURN_IF_ERROR(values(reader, tensor, chunk, payload, hash, value_stats,
                               part.empty() && tiles ? &*tiles : nullptr));
        if (!part.empty())
          judge(tensor.name + " at " + shape_text(chunk.offset) + "." + part, payload.shape,
                *payload.dtype, own);
      }
      if (recorded != nullptr) hold(tensor, chunk, *recorded, hash.hex());
      if (cells != nullptr && tiles->digits() != cells->digits)
        find(tensor.name,
             "the chunk at " + shape_text(chunk.offset) +
                 " is not what lowbit-ckpt wrote: the digests of its parts are others",
             printable(m.file_names[chunk.extent.file]));
    }
    if (recorded != nullptr && tiled < recorded->tiles.size())
      find(tensor.name, "lowbit.json has digests of parts of chunks that are not there");
    judge(tensor.name, tensor.shape, *tensor.dtype, whole);
    return fine();
  }

  /// What lowbit.json says of the parts of a chunk, which Reader holds a load to; null if nothing.
  static const Recorded::Tiles* tiles_of(const Recorded::Entry* recorded, const Chunk& chunk) {
    if (recorded == nullptr) return nullptr;
    const auto known = recorded->tiles.find(chunk_key(chunk.offset));
    return known == recorded->tiles.end() ? nullptr : &known->second;
  }

  /// Reads a part of a chunk, row-major.
  Status values(TensorReader& reader, const Tensor& tensor, const Chunk& chunk,
                const Payload& payload, Hash& hash, ValueStats& value_stats, TileHasher* tiles) {
    const auto width = static_cast<uint64_t>(payload.dtype->bytes);
    const bool plain = payload.dtype == tensor.dtype && payload.shape == chunk.shape;
    const Shape strides = row_major(plain ? tensor.shape : payload.shape);
    const std::string what = printable(tensor.name) + " at " + shape_text(chunk.offset);
    std::string buffer;
    return for_pieces(
        Box{Shape(payload.shape.size(), 0), payload.shape}, kVerifyPiece / width,
        [&](const Box& piece) -> Status {
          const uint64_t n = volume(piece.shape);
          buffer.resize(n * width);
          if (const Status got = reader.read(payload, piece, buffer.data(), what); !got.ok())
            return Error(got.error()).at(printable(tensor.name), "", "");
          hash.add(buffer.data(), buffer.size());
          if (tiles != nullptr) tiles->add(buffer.data(), buffer.size());
          const uint64_t first =
              position(piece.offset, strides) + (plain ? position(chunk.offset, strides) : 0);
          take(*payload.dtype, buffer.data(), first, n, value_stats);
          bytes += buffer.size();
          return fine();
        });
  }

  void hold(const Tensor& tensor, const Chunk& chunk, const Recorded::Entry& recorded,
            const std::string& digest) {
    const auto known = recorded.chunks.find(chunk_key(chunk.offset));
    const std::string where = "the chunk at " + shape_text(chunk.offset);
    const std::string file = printable(document_.manifest->file_names[chunk.extent.file]);
    if (known == recorded.chunks.end()) {
      find(tensor.name, where + " has no digest in lowbit.json", file);
    } else if (known->second != digest) {
      find(tensor.name, where + " is not what lowbit-ckpt wrote: its digest is another", file);
    }
  }

  void judge(const std::string& name, const Shape& shape, const Dtype& dtype, const ValueStats& c) {
    if (c.odd > 0)
      warnings.push_back(printable(name) + ": " + std::to_string(c.odd) +
                         " values of bool are neither 0 nor 1");
    if (!options_.finite || !has_floats(dtype)) return;
    const Role role = role_of(name);
    if (role == Role::kBits) return;
    const auto found = [&](uint64_t n, const char* what, uint64_t first) {
      const std::string text = std::to_string(n) + " of " + std::to_string(c.count) + " values " +
                               what + ", the first at " + shape_text(index_of(shape, first));
      if (role == Role::kWeight && c.nan == 0) {  // masks have infinities
        warnings.push_back(printable(name) + ": " + text);
      } else {
        find(name, text);
      }
    };
    if (c.nan + c.infinite > 0) found(c.nan + c.infinite, "are not finite", c.first);
    if (role == Role::kPositiveState && c.negative > 0)
      found(c.negative, "are negative", c.first_negative);
  }

  const Document& document_;
  const VerifyOptions& options_;
};

/// What is recorded of values; of all of them, or of none.
Status hold_values(const Manifest& m, const Recorded& recorded, const Selection& select,
                   TensorCheck& out) {
  if (!recorded.values) return fine();
  std::set<std::string> gone;
  for (const auto& [name, digest] : *recorded.values) gone.insert(name);
  for (const Blob& b : m.blobs) {
    gone.erase(b.name);
    if (!selected(select, b.name) || recorded.tensors.contains(b.name)) continue;
    const auto known = recorded.values->find(b.name);
    if (known == recorded.values->end()) {
      if (is_utf8(b.name, false)) out.find(b.name, "is not in lowbit.json: it was added later");
      continue;
    }
    ASSIGN_OR_RETURN(digest, value_digest(m, b));
    if (digest != known->second)
      out.find(b.name, "is not what lowbit-ckpt wrote: its digest is another",
               m.container->files().name(b.extent.file));
  }
  if (!gone.empty())
    out.find("lowbit.json",
             "names values that the checkpoint does not have, such as " + printable(*gone.begin()));
  return fine();
}

/// What is recorded of tensors and values as a whole.
Status hold_recorded(const Document& document, const Recorded& recorded, const Selection& select,
                     TensorCheck& out) {
  const Manifest& m = *document.manifest;
  size_t met = static_cast<size_t>(
      std::ranges::count_if(m.blobs,  // of a dtype that is not read
                            [&](const Blob& b) { return recorded.tensors.contains(b.name); }));
  for (const Tensor& t : m.tensors) {
    const auto known = recorded.tensors.find(t.name);
    if (known != recorded.tensors.end()) ++met;
    if (!selected(select, t.name)) continue;
    if (known == recorded.tensors.end()) {
      if (is_utf8(t.name, false)) out.find(t.name, "is not in lowbit.json: it was added later");
      continue;
    }
    if (known->second.dtype != t.dtype->name || known->second.shape != t.shape)
      out.find(t.name, "has another dtype or shape than lowbit-ckpt wrote");
    if (known->second.chunks.size() > t.chunks.size())
      out.find(t.name, "has fewer chunks than lowbit-ckpt wrote");
  }
  if (met < recorded.tensors.size())
    out.find("lowbit.json", "names tensors that the checkpoint does not have");
  return hold_values(m, recorded, select, out);
}

/// What is selected.
struct Selected {
  std::vector<const Leaf*> tensors;
  uint64_t bytes = 0, values = 0;   // of tensors; leaves that are none
  std::vector<std::string> opaque;  // what is said of each
};

/// An error of something that is opaque.
Error opaque_error(const Document& document, const std::string& name, const Value& value) {
  const std::string what = printable(document.manifest->path) + ": " + printable(name) + ": is ";
  if (value.is_unread_tensor())
    return bad(what + printable(value.text) +
               ", which is not read. verify --opaque lets it pass, and --exclude leaves it out");
  return bad(what + "opaque: " + opaque_names(value) +
             ", which torch would import and run; nothing was executed. verify --opaque lets it "
             "pass, and " +
             (value.holds_tensor() || value.holds_array() ? "--exclude" : "convert") +
             " leaves it out");
}
std::string opaque_line(const std::string& name, const Value& value) {
  return printable(name) +
         ": is opaque, not read: " + (value.is_opaque() ? opaque_names(value) : "no plain value");
}

/// An error where a value is not plain data, unless `options` let it pass.
Result<Selected> select_leaves(const Document& document, const VerifyOptions& options) {
  Selected out;
  for (const Leaf& leaf : document.leaves) {
    if (!selected(options.select, leaf.name())) continue;
    if (leaf.kind == Leaf::Kind::kTensor || leaf.kind == Leaf::Kind::kSubclass) {
      out.tensors.push_back(&leaf);
      out.bytes += leaf.bytes();
      continue;
    }
    ++out.values;
    if (leaf.kind != Leaf::Kind::kOpaque || leaf.value.is_writable()) continue;
    // Tensors in a value, arrays of numpy, io.BytesIO: Reader loads them, and runs nothing.
    const Manifest& m = *document.manifest;
    if (m.kind == ContainerKind::kDcp && leaf.blob->extent.length > 0 &&
        check_value_archive(m, *leaf.blob).ok())
      continue;
    out.opaque.push_back(opaque_line(leaf.name(), leaf.value));
    if (!options.opaque) {
      ASSIGN_OR_RETURN(value,
                       document.manifest->container->value(*leaf.blob));  // says what it names
      return opaque_error(document, leaf.name(), value);
    }
  }
  for (const auto& [name, value] : opaque_attributes(document)) {
    if (value.is_dict() || value.is_writable() || !selected(options.select, name)) continue;
    out.opaque.push_back(opaque_line(name, value));
    if (!options.opaque) return opaque_error(document, name, value);
  }
  return out;
}

/// Checks `tensors`, each by its own of `checks`.
Status check_tensors(const Selected& what, const std::optional<Recorded>& recorded,
                     const VerifyOptions& options, std::vector<TensorCheck>& checks) {
  std::mutex lock;
  uint64_t done = 0;
  return parallel(what.tensors.size(), options.threads, [&](size_t i) -> Status {
    const Leaf& leaf = *what.tensors[i];
    const Recorded::Entry* entry = nullptr;
    if (recorded && leaf.stored != nullptr) {
      const auto known = recorded->tensors.find(leaf.stored->name);
      if (known != recorded->tensors.end()) entry = &known->second;
    }
    RETURN_IF_ERROR(checks[i].check(leaf, entry));
    const std::lock_guard guard(lock);
    done += leaf.bytes();
    return options.progress(done, what.bytes) ? fine() : Status(interrupted());
  });
}

/// Moments without the count of steps that corrects their bias, or with one that is not a count: no
/// optimizer resumes from them. Some libraries count once for a group.
void find_steps(const Model& model, TensorCheck& out) {
  if (std::ranges::any_of(model.groups,
                          [](const Group& g) { return setting(g, "step") != nullptr; }))
    return;
  for (const Param& p : model.params) {
    const auto has = [&p](std::string_view name) {
      return std::ranges::any_of(p.states, [name](const State& s) { return s.name == name; });
    };
    const Value* step = number_in(p, "step");
    if (step != nullptr) {
      const auto counted = steps_of(*step, "its step");
      if (!counted.ok()) out.find(shown(p), counted.error().text);
    } else if (has("exp_avg") && has("exp_avg_sq")) {
      out.find(shown(p), "has no step");
    }
  }
}

/// Adam's parameters that lack one of the two moments, which others of their group have. A
/// parameter without any state may never have been stepped.
void find_moments(const Model& model, TensorCheck& out) {
  if (model.algorithm != "adam") return;
  for (const Group& group : model.groups) {
    for (const std::string name : {"exp_avg", "exp_avg_sq"}) {
      const auto has = [&](size_t i) {
        const auto& states = model.params[i].states;
        return std::ranges::any_of(
            states, [&](const State& s) { return s.name == name || s.name == name + "_row"; });
      };
      if (std::ranges::none_of(group.params, has)) continue;
      for (const size_t i : group.params) {
        if (!has(i) && !model.params[i].states.empty())
          out.find(shown(model.params[i]),
                   "has no " + name + ", which other parameters of its group have");
      }
    }
  }
}

/// The places of leaves, and what an optimizer of lowbit's would make of its state: what is
/// missing, cast or contradictory there has sound bytes. A part of a checkpoint is not judged.
void check_meaning(const std::shared_ptr<const Document>& document, const VerifyOptions& options,
                   TensorCheck& out) {
  if (!options.select.include.empty() || !options.select.exclude.empty()) return;
  const auto find = [&](const Error& error) {
    out.find(error.tensor.empty() ? "the checkpoint" : error.tensor, error.text);
  };
  if (const Status places = check_places(*document); !places.ok()) return find(places.error());
  if (!has_optimizer_tree(*document)) return;
  const auto found = recognize(*document);
  if (!found.ok()) return;
  const std::string_view dialect = found.value().dialect->name;
  if (dialect != "lowbit" && dialect != "torch") return;
  const auto model = found.value().dialect->read(document, found.value().tree);
  if (!model.ok() && dialect == "lowbit") find(model.error());
  if (!model.ok()) return;
  find_steps(model.value(), out);
  find_moments(model.value(), out);
}

/// A warning where records have no checksums that should have some.
void warn_unchecked(const Manifest& m, Json& warnings) {
  if (m.kind == ContainerKind::kSafetensors || m.kind == ContainerKind::kLegacy) return;
  if (const uint64_t unchecked = m.container->reader().unchecked(); unchecked > 0)
    warnings.push_back(std::to_string(unchecked) +
                       " records have no checksums: their writer computed none");
}

}  // namespace

Result<Json> verify(const std::string& path, const VerifyOptions& options) {
  ASSIGN_OR_RETURN(opened, open_checkpoint(path));
  const auto shared = std::make_shared<const Document>(std::move(opened));
  const Document& document = *shared;
  RETURN_IF_ERROR(check_selection(document, options.select));
  ASSIGN_OR_RETURN(recorded, read_recorded(*document.manifest));
  ASSIGN_OR_RETURN(what, select_leaves(document, options));
  if (what.tensors.empty() && what.values == 0 && what.opaque.empty() && !document.leaves.empty())
    return usage("nothing of " + printable(path) + " is selected");
  std::vector<TensorCheck> checks(what.tensors.size() + 1, TensorCheck(document, options));
  if (recorded) RETURN_IF_ERROR(hold_recorded(document, *recorded, options.select, checks.back()));
  check_meaning(shared, options, checks.back());
  RETURN_IF_ERROR(check_tensors(what, recorded, options, checks));
  RETURN_IF_ERROR(document.finish());
  Json warnings = document.manifest->warnings, findings = Json::array();
  for (const std::string& w : warn_of_exclude(document, options.select)) warnings.push_back(w);
  uint64_t bytes = 0;
  for (const TensorCheck& check : checks) {
    bytes += check.bytes;
    for (const std::string& w : check.warnings) warnings.push_back(w);
    for (const Json& f : check.findings) findings.push_back(f);
  }
  for (const std::string& line : what.opaque) warnings.push_back(line);
  warn_unchecked(*document.manifest, warnings);
  const bool ok = findings.empty();
  return Json{{"path", printable(path)},
              {"container", container_name(document.manifest->kind)},
              {"ok", ok},
              {"checked",
               {{"tensors", what.tensors.size()},
                {"values", what.values},
                {"bytes", bytes},
                {"digests", recorded.has_value()}}},
              {"warnings", std::move(warnings)},
              {"findings", std::move(findings)}};
}

}  // namespace lowbit::ckpt
