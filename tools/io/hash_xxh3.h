// The body of a source that compiles XXH3. Its functions are static, so that no program runs one
// instruction set's where another's is meant.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "io/hash_kernels.h"

namespace lowbit::ckpt {
namespace {

static_assert(sizeof(XXH3_state_t) <= kHashState && alignof(XXH3_state_t) <= 64);

void xxh3_reset(void* state) { XXH3_128bits_reset(static_cast<XXH3_state_t*>(state)); }

void xxh3_add(void* state, const void* data, uint64_t bytes) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
}

void xxh3_digest(const void* state, unsigned char* out) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical,
                           XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state)));
  for (unsigned i = 0; i < sizeof(canonical.digest); ++i) out[i] = canonical.digest[i];
}

}  // namespace
}  // namespace lowbit::ckpt
