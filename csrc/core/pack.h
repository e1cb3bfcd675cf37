// Packed codes of fewer than 8 bits. The codes of a row form one stream of bits, element 0 lowest.
// Tiles and blocks have multiples of 8 codes, so they begin on a byte. Bits after the last code of
// a row are zero.
#pragma once

#include <cstdint>

#include "core/macros.h"

#if defined(__AVX2__) && !defined(__CUDACC__)
#include "core/pack_x86.h"
#endif

namespace lowbit {

/// The fields of `width` bits that begin every 2 * `every` bits of a word, those of odd number with
/// `odd`. Eight codes move together in three steps, each of which joins neighbors or parts them.
constexpr uint64_t fields(int width, int every, bool odd) {
  uint64_t mask = 0;
  for (int at = odd ? every : 0; at < 64; at += 2 * every) mask |= ((1ull << width) - 1) << at;
  return mask;
}
template <int kBits, int kCount = 1>
LB_HD uint64_t joined(uint64_t w) {
  if constexpr (kCount == 8) {
    return w;
  } else {
    constexpr int kWidth = kCount * kBits, kEvery = kCount * 8;
    return joined<kBits, 2 * kCount>((w & fields(kWidth, kEvery, false)) |
                                     (w & fields(kWidth, kEvery, true)) >> (kEvery - kWidth));
  }
}
template <int kBits, int kCount = 4>
LB_HD uint64_t parted(uint64_t w) {
  constexpr int kWidth = kCount * kBits, kEvery = kCount * 8;
  w = (w & fields(kWidth, kEvery, false)) | (w << (kEvery - kWidth) & fields(kWidth, kEvery, true));
  if constexpr (kCount == 1) {
    return w;
  } else {
    return parted<kBits, kCount / 2>(w);
  }
}

/// kBytes bytes as a word and back, in whole loads and stores: a word that is read before its parts
/// have reached the cache costs as much as eight codes.
template <int kBytes>
LB_HD uint64_t load_bytes(const uint8_t* in) {
  constexpr int kFirst = kBytes >= 4 ? 4 : kBytes >= 2 ? 2 : 1;
  uint64_t word = 0;
  if constexpr (kFirst == 4) {
    uint32_t part;
    __builtin_memcpy(&part, in, 4), word = part;
  } else if constexpr (kFirst == 2) {
    uint16_t part;
    __builtin_memcpy(&part, in, 2), word = part;
  } else {
    word = *in;
  }
  if constexpr (kBytes > kFirst) word |= load_bytes<kBytes - kFirst>(in + kFirst) << (8 * kFirst);
  return word;
}
template <int kBytes>
LB_HD void store_bytes(uint64_t word, uint8_t* out) {
  constexpr int kFirst = kBytes >= 4 ? 4 : kBytes >= 2 ? 2 : 1;
  if constexpr (kFirst == 4) {
    const auto part = static_cast<uint32_t>(word);
    __builtin_memcpy(out, &part, 4);
  } else if constexpr (kFirst == 2) {
    const auto part = static_cast<uint16_t>(word);
    __builtin_memcpy(out, &part, 2);
  } else {
    *out = static_cast<uint8_t>(word);
  }
  if constexpr (kBytes > kFirst) store_bytes<kBytes - kFirst>(word >> (8 * kFirst), out + kFirst);
}

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
#if defined(__AVX2__) && !defined(__CUDACC__)
    if constexpr (kBits > 2) i = pack_turns<kBits>(codes, out, n), out += i / 8 * kBits;
#endif
    for (; i + 8 <= n; i += 8, out += kBits) {
      uint64_t word;
      __builtin_memcpy(&word, codes + i, 8);
      store_bytes<kBits>(joined<kBits>(word), out);
    }
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
#if defined(__AVX2__) && !defined(__CUDACC__)
    if constexpr (kBits > 2) i = unpack_turns<kBits>(in, codes, n), in += i / 8 * kBits;
#endif
    for (; i + 8 <= n; i += 8, in += kBits) {
      const uint64_t word = parted<kBits>(load_bytes<kBits>(in));
      __builtin_memcpy(codes + i, &word, 8);
    }
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
