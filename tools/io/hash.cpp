#include "io/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lowbit::ckpt {

struct Hash::State {
  XXH3_state_t xxh;  // 64-byte aligned, so it lies on the heap by itself
};

Hash::Hash() : state_(new State) { XXH3_128bits_reset(&state_->xxh); }
Hash::~Hash() = default;
Hash::Hash(Hash&&) noexcept = default;
Hash& Hash::operator=(Hash&&) noexcept = default;

void Hash::add(const void* data, uint64_t bytes) { XXH3_128bits_update(&state_->xxh, data, bytes); }

std::string Hash::hex() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->xxh));
  std::string out;
  for (const unsigned char b : canonical.digest) {
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

}  // namespace lowbit::ckpt
