#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <memory>

#include "pipeline/commands.h"

namespace lowbit::ckpt {

Result<std::string> digest(const Document& document, const Progress& progress) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  XXH3_128bits_reset(state.get());
  std::vector<const Leaf*> tensors;
  uint64_t done = 0, total = 0;
  for (const Leaf& leaf : document.leaves) {
    if (leaf.kind != Leaf::Kind::kTensor) continue;
    tensors.push_back(&leaf);
    total += leaf.bytes();
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const Leaf* a, const Leaf* b) { return a->name() < b->name(); });
  for (const Leaf* leaf : tensors) {
    const std::string head = leaf->name() + '\0' + leaf->dtype->name + shape_text(leaf->shape);
    XXH3_128bits_update(state.get(), head.data(), head.size() + 1);
    LB_CHECK(for_elements(*leaf, 0, volume(leaf->shape), 4u << 20,
                          [&](const char* data, uint64_t, uint64_t count) -> Status {
                            const uint64_t bytes =
                                count * static_cast<uint64_t>(leaf->dtype->bytes);
                            XXH3_128bits_update(state.get(), data, bytes);
                            done += bytes;
                            return progress(done, total) ? fine() : Status(interrupted());
                          }));
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state.get()));
  std::string hex;
  for (const unsigned char b : canonical.digest) {
    hex += "0123456789abcdef"[b >> 4];
    hex += "0123456789abcdef"[b & 15];
  }
  return hex;
}

}  // namespace lowbit::ckpt
