#include "io/hash.h"

#include "io/hash_xxh3.h"

namespace lowbit::ckpt {

const HashKernels kHashBaseline = {"baseline", xxh3_reset, xxh3_add, xxh3_digest};

const HashKernels& hash_kernels() {
#ifdef __x86_64__
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return kHashAvx2;
#endif
  return kHashBaseline;
}

struct Hash::State {
  alignas(64) unsigned char bytes[kHashState];
};

Hash::Hash() : Hash(hash_kernels()) {}
Hash::Hash(const HashKernels& kernels) : kernels_(&kernels), state_(new State) {
  kernels.reset(state_->bytes);
}
Hash::~Hash() = default;
Hash::Hash(Hash&&) noexcept = default;
Hash& Hash::operator=(Hash&&) noexcept = default;

void Hash::add(const void* data, uint64_t bytes) { kernels_->add(state_->bytes, data, bytes); }

std::string Hash::hex() const {
  unsigned char digest[16];
  kernels_->digest(state_->bytes, digest);
  std::string out;
  for (const unsigned char b : digest) {
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

std::string digest_of(std::string_view bytes) {
  Hash hash;
  hash.add(bytes.data(), bytes.size());
  return hash.hex();
}

}  // namespace lowbit::ckpt
