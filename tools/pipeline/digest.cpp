#include <algorithm>

#include "io/hash.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {

Result<std::string> digest(const Document& document, const Progress& progress) {
  Hash hash;
  std::vector<const Leaf*> tensors;
  uint64_t done = 0, total = 0;
  for (const Leaf& leaf : document.leaves) {
    if (leaf.kind != Leaf::Kind::kTensor || leaf.source == nullptr) continue;
    tensors.push_back(&leaf);
    total += leaf.bytes();
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const Leaf* a, const Leaf* b) { return a->name() < b->name(); });
  for (const Leaf* leaf : tensors) {
    const std::string head = leaf->name() + '\0' + leaf->dtype->name + shape_text(leaf->shape);
    hash.add(head.data(), head.size() + 1);
    LB_CHECK(for_elements(*leaf, 0, volume(leaf->shape), 1u << 20,
                          [&](const char* data, uint64_t, uint64_t count) -> Status {
                            const uint64_t bytes =
                                count * static_cast<uint64_t>(leaf->dtype->bytes);
                            hash.add(data, bytes);
                            done += bytes;
                            return progress(done, total) ? fine() : Status(interrupted());
                          }));
  }
  LB_CHECK(document.finish());
  return hash.hex();
}

}  // namespace lowbit::ckpt
