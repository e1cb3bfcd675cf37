#include <algorithm>
#include <functional>

#include "container/document/subclass_cut.h"
#include "dialect/torchao/state.h"
#include "io/hash.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kDigestPiece = 1u << 20;

/// Bytes that are hashed of a leaf, a piece at a time.
using TakeBytes = std::function<Status(const char*, uint64_t)>;

Status bytes_of(const Leaf& leaf, const TakeBytes& take) {
  return for_elements(leaf, 0, volume(leaf.shape), kDigestPiece,
                      [&](const char* data, uint64_t, uint64_t count) {
                        return take(data, count * static_cast<uint64_t>(leaf.dtype->bytes));
                      });
}

/// Of a quantized tensor the values: where its blocks begin depends on how it is cut.
Status values_of(const Document& document, const Leaf& leaf, const TakeBytes& take) {
  ASSIGN_OR_RETURN(read, torchao_state(document, leaf));
  std::vector<float> values(kDigestPiece / sizeof(float));
  const uint64_t n = volume(leaf.shape);
  for (uint64_t at = 0; at < n; at += values.size()) {
    const uint64_t count = std::min<uint64_t>(values.size(), n - at);
    RETURN_IF_ERROR(read.state.values->read(at, count, values.data()));
    RETURN_IF_ERROR(take(reinterpret_cast<const char*>(values.data()), count * sizeof(float)));
  }
  return fine();
}

}  // namespace

Result<std::string> digest(const Document& document, const Progress& progress) {
  Hash hash;
  std::vector<const Leaf*> tensors;
  uint64_t done = 0, total = 0;
  for (const Leaf& leaf : document.leaves) {
    if (leaf.kind != Leaf::Kind::kTensor && !is_subclass(leaf)) continue;
    tensors.push_back(&leaf);
    total += leaf.bytes();
  }
  std::ranges::sort(tensors, [](const Leaf* a, const Leaf* b) { return a->name() < b->name(); });
  for (const Leaf* leaf : tensors) {
    const std::string head = leaf->name() + '\0' + leaf->dtype->name + shape_text(leaf->shape);
    hash.add(head.data(), head.size() + 1);
    const TakeBytes take = [&](const char* data, uint64_t bytes) -> Status {
      hash.add(data, bytes);
      done += bytes;
      return progress(std::min(done, total), total) ? fine() : Status(interrupted());
    };
    RETURN_IF_ERROR(is_subclass(*leaf) ? values_of(document, *leaf, take) : bytes_of(*leaf, take));
  }
  RETURN_IF_ERROR(document.finish());
  return hash.hex();
}

}  // namespace lowbit::ckpt
