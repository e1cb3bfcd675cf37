// XXH3 compiled for one instruction set each. All give the same digests.
#pragma once

#include <cstdint>

namespace lowbit::ckpt {

/// Functions over a state of kHashState bytes, aligned to 64.
struct HashKernels {
  const char* isa;
  void (*reset)(void* state);
  void (*add)(void* state, const void* data, uint64_t bytes);
  /// Writes 16 bytes, the largest digit first.
  void (*digest)(const void* state, unsigned char* out);
};

inline constexpr uint64_t kHashState = 640;

extern const HashKernels kHashBaseline;
#ifdef __x86_64__
extern const HashKernels kHashAvx2;
#endif

/// The fastest that this processor runs.
const HashKernels& hash_kernels();

}  // namespace lowbit::ckpt
