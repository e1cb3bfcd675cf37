#include "container/open.h"
#include "container/record_reader.h"
#include "io/text.h"
#include "pipeline/census.h"
#include "pipeline/commands.h"
#include "pipeline/parallel.h"
#include "pipeline/role.h"
#include "pipeline/select.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 1u << 20;

/// One tensor: all of its values are read, so that the checksums of their records are held.
class TensorCheck {
 public:
  TensorCheck(const Document& document, const VerifyOptions& options)
      : document_(document), options_(options) {}

  /// A line for each thing that is wrong with the values, `file` being where they lie.
  Status check(const Leaf& leaf) {
    if (leaf.kind == Leaf::Kind::kSubclass) {
      for (const Leaf& part : leaf.parts) LB_CHECK(dense(part, leaf.name() + "." + part.name()));
      return fine();
    }
    if (leaf.stored == nullptr || leaf.source != nullptr) return dense(leaf, leaf.name());
    return chunks(*leaf.stored);
  }

  std::vector<Json> findings;
  std::vector<std::string> warnings;
  uint64_t bytes = 0;

 private:
  Status dense(const Leaf& leaf, const std::string& name) {
    Census census;
    LB_CHECK(for_elements(leaf, 0, volume(leaf.shape), kPiece,
                          [&](const char* values, uint64_t first, uint64_t count) {
                            take(*leaf.dtype, values, first, count, census);
                            return fine();
                          }));
    bytes += leaf.bytes();
    judge(name, leaf.shape, *leaf.dtype, census);
    return fine();
  }

  /// A tensor of a directory whose items hold a subclass: each chunk's parts for themselves.
  Status chunks(const Tensor& tensor) {
    const Manifest& m = *document_.manifest;
    RecordReader reader(m.container->files());
    std::string buffer;
    for (const Chunk& chunk : tensor.chunks) {
      LB_TRY(stored, m.container->stored(tensor, chunk));
      for (const auto& [part, payload] : stored.parts) {
        const std::string name = tensor.name + "." + part;
        Census census;
        const auto width = static_cast<uint64_t>(payload.dtype->bytes);
        for (uint64_t at = 0; at < payload.record.size; at += buffer.size()) {
          buffer.resize(std::min(kPiece, payload.record.size - at));
          LB_CHECK(reader.read(payload.record, at, buffer.data(), buffer.size(), printable(name)));
          take(*payload.dtype, buffer.data(), at / width, buffer.size() / width, census);
        }
        bytes += payload.record.size;
        judge(name, payload.shape, *payload.dtype, census);
      }
    }
    return reader.finish();
  }

  void judge(const std::string& name, const Shape& shape, const Dtype& dtype, const Census& c) {
    if (!options_.finite || !has_floats(dtype)) return;
    const Role role = role_of(name);
    const auto found = [&](uint64_t n, const char* what, uint64_t first) {
      const std::string text = std::to_string(n) + " of " + std::to_string(c.count) + " values " +
                               what + ", the first at " + shape_text(place_of(shape, first));
      if (role == Role::kWeight) {
        warnings.push_back(printable(name) + ": " + text);
      } else {
        findings.push_back({{"tensor", printable(name)}, {"what", text}});
      }
    };
    if (c.nan + c.infinite > 0) found(c.nan + c.infinite, "are not finite", c.first);
    if (role == Role::kPositiveState && c.negative > 0)
      found(c.negative, "are negative", c.first_negative);
  }

  static Shape place_of(const Shape& shape, uint64_t element) {
    const Shape stride = row_major(shape);
    Shape at;
    for (const int64_t s : stride) {
      at.push_back(static_cast<int64_t>(element / static_cast<uint64_t>(s)));
      element %= static_cast<uint64_t>(s);
    }
    return at;
  }

  const Document& document_;
  const VerifyOptions& options_;
};

}  // namespace

Result<Json> verify(const std::string& path, const VerifyOptions& options) {
  LB_TRY(document, open_checkpoint(path));
  std::vector<const Leaf*> tensors;
  uint64_t total = 0, done = 0, values = 0;
  LB_CHECK(check_selection(document, options.select));
  for (const Leaf& leaf : document.leaves) {
    if (!selected(options.select, leaf.name())) continue;
    if (leaf.kind == Leaf::Kind::kTensor || leaf.kind == Leaf::Kind::kSubclass) {
      tensors.push_back(&leaf);
      total += leaf.bytes();
    } else {
      ++values;
    }
  }
  std::vector<TensorCheck> checks(tensors.size(), TensorCheck(document, options));
  std::mutex lock;
  LB_CHECK(parallel(tensors.size(), options.threads, [&](size_t i) -> Status {
    LB_CHECK(checks[i].check(*tensors[i]));
    const std::lock_guard guard(lock);
    done += tensors[i]->bytes();
    return options.progress(done, total) ? fine() : Status(interrupted());
  }));
  Json out{{"path", printable(path)},
           {"container", container_name(document.manifest->kind)},
           {"ok", true},
           {"checked", {{"tensors", tensors.size()}, {"values", values}, {"bytes", 0}}},
           {"warnings", document.manifest->warnings},
           {"findings", Json::array()}};
  uint64_t bytes = 0;
  for (const TensorCheck& check : checks) {
    bytes += check.bytes;
    for (const std::string& w : check.warnings) out["warnings"].push_back(w);
    for (const Json& f : check.findings) out["findings"].push_back(f);
  }
  out["checked"]["bytes"] = bytes;
  out["ok"] = out["findings"].empty();
  return out;
}

}  // namespace lowbit::ckpt
