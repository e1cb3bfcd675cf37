// Packed codes of fewer than 8 bits. The codes of a row form one stream of bits, element 0 lowest.
// Tiles and blocks have multiples of 8 codes, so they begin on a byte. Bits after the last code of
// a row are zero.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// Packs n codes, one per byte, into code_bytes(n, kBits) bytes.
template <int kBits>
LB_HD void pack(const uint8_t* codes, uint8_t* out, int n) {
  static_assert(kBits >= 1 && kBits < 8);
  int i = 0;
  if constexpr (kBits == 4) {
    for (; i < n / 2; ++i) {  // two codes form a little-endian word, which compilers vectorize
      uint16_t pair;
      __builtin_memcpy(&pair, codes + 2 * i, 2);
      out[i] = static_cast<uint8_t>(pair | pair >> 4);
    }
    if (n & 1) out[i] = codes[n - 1];
  } else {
    for (; i < n; i += 8, out += kBits) {
      const int count = n - i < 8 ? n - i : 8;
      uint64_t word = 0;
      for (int e = 0; e < count; ++e) word |= static_cast<uint64_t>(codes[i + e]) << (e * kBits);
      for (int b = 0; b * 8 < count * kBits; ++b) out[b] = static_cast<uint8_t>(word >> (8 * b));
    }
  }
}

/// The inverse of pack.
template <int kBits>
LB_HD void unpack(const uint8_t* in, uint8_t* codes, int n) {
  constexpr uint8_t kMask = (1u << kBits) - 1;
  int i = 0;
  if constexpr (kBits == 4) {
    for (; i < n / 2; ++i) {
      const uint16_t pair = static_cast<uint16_t>((in[i] | in[i] << 4) & 0x0f0f);
      __builtin_memcpy(codes + 2 * i, &pair, 2);
    }
    if (n & 1) codes[n - 1] = in[i] & kMask;
  } else {
    for (; i < n; i += 8, in += kBits) {
      const int count = n - i < 8 ? n - i : 8;
      uint64_t word = 0;
      for (int b = 0; b * 8 < count * kBits; ++b) word |= static_cast<uint64_t>(in[b]) << (8 * b);
      for (int e = 0; e < count; ++e)
        codes[i + e] = static_cast<uint8_t>(word >> (e * kBits)) & kMask;
    }
  }
}

}  // namespace lowbit
