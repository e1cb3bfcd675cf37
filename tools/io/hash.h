// XXH3-128 of bytes that arrive in pieces, as hex digits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace lowbit::ckpt {

class Hash {
 public:
  Hash();
  ~Hash();
  Hash(Hash&&) noexcept;
  Hash& operator=(Hash&&) noexcept;
  void add(const void* data, uint64_t bytes);
  /// The digest of all bytes added so far: 32 hex digits.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lowbit::ckpt
