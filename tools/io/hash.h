// XXH3-128 of bytes that arrive in pieces, as hex digits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lowbit::ckpt {

struct HashKernels;

class Hash {
 public:
  /// With the fastest kernels that this processor runs.
  Hash();
  explicit Hash(const HashKernels& kernels);
  ~Hash();
  Hash(Hash&&) noexcept;
  Hash& operator=(Hash&&) noexcept;
  void add(const void* data, uint64_t bytes);
  /// The digest of all bytes added so far: 32 hex digits.
  std::string hex() const;

 private:
  struct State;
  const HashKernels* kernels_;
  std::unique_ptr<State> state_;
};

/// The digest of `bytes`.
std::string digest_of(std::string_view bytes);

}  // namespace lowbit::ckpt
