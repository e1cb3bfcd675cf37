// pack.h in vectors: 3, 5, 6 and 7 bits, whole groups of 32 or 64 codes, the same bytes.
//
// Neighbors join by multiplication, c0 + c1 * 2^b, twice, and once by two shifts: eight codes are
// then b bytes of a 64-bit lane. Nothing beyond the last byte is read or written.
//
// Included by pack.h, at its beginning, and by nothing else.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// Where the bytes of a register go, computed at compile time.
template <int kSize>
struct ByteOrder {
  alignas(kSize) uint8_t at[kSize] = {};
  template <class Fn>
  constexpr explicit ByteOrder(const Fn& fn) {
    for (int i = 0; i < kSize; ++i) at[i] = static_cast<uint8_t>(fn(i));
  }
};

#if defined(__AVX512VBMI__)

constexpr int kPackTurn = 64;  // codes

template <int kBits>
LB_HD void pack_turn(const uint8_t* codes, uint8_t* out) {
  constexpr ByteOrder<64> kJoined([](int i) { return i / kBits * 8 + i % kBits; });
  const __m512i pairs = _mm512_maddubs_epi16(
      _mm512_set1_epi16(static_cast<int16_t>(1 | 1 << (8 + kBits))), _mm512_loadu_si512(codes));
  const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 1 << (16 + 2 * kBits)));
  constexpr int kGap = 32 - 4 * kBits;  // between the lower and the upper four codes
  const __m512i eights = _mm512_srli_epi64(_mm512_sllv_epi32(fours, _mm512_set1_epi64(kGap)), kGap);
  const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(kJoined.at), eights);
  _mm512_mask_storeu_epi8(out, (1ull << (8 * kBits)) - 1, bytes);
}

template <int kBits>
LB_HD void unpack_turn(const uint8_t* in, uint8_t* codes) {
  constexpr ByteOrder<64> kParted([](int i) { return i / 8 * kBits + i % 8 % kBits; });
  constexpr ByteOrder<64> kFirstBit([](int i) { return i % 8 * kBits; });
  const __m512i bytes = _mm512_maskz_loadu_epi8((1ull << (8 * kBits)) - 1, in);
  const __m512i eights = _mm512_permutexvar_epi8(_mm512_load_si512(kParted.at), bytes);
  const __m512i fields = _mm512_multishift_epi64_epi8(_mm512_load_si512(kFirstBit.at), eights);
  _mm512_storeu_si512(codes, _mm512_and_si512(fields, _mm512_set1_epi8((1 << kBits) - 1)));
}

#else

constexpr int kPackTurn = 32;  // codes, 4 * kBits bytes

LB_HD __m256i byte_order(const ByteOrder<32>& order) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(order.at));
}

template <int kBits>
LB_HD void pack_turn(const uint8_t* codes, uint8_t* out) {
  // The lower lane's 2 * kBits bytes in order; of the upper lane's the first 8 (or 4), then the
  // last.
  constexpr int kLane = 2 * kBits, kPart = kLane < 8 ? 4 : 8;
  constexpr ByteOrder<32> kJoined([](int i) {
    const int at = i < 16 || kLane < 8 ? i % 16 % kLane : i % 16 < 8 ? i % 8 : i % 8 + kLane - 8;
    return at < kBits ? at : 8 + at - kBits;
  });
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_set1_epi16(static_cast<int16_t>(1 | 1 << (8 + kBits))),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 1 << (16 + 2 * kBits)));
  constexpr int kGap = 32 - 4 * kBits;  // between the lower and the upper four codes
  const __m256i eights =
      _mm256_srli_epi64(_mm256_sllv_epi32(fours, _mm256_set1_epi64x(kGap)), kGap);
  const __m256i bytes = _mm256_shuffle_epi8(eights, byte_order(kJoined));
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  if constexpr (kPart == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), low);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + kLane), high);
    const int64_t last = _mm_extract_epi64(high, 1);
    __builtin_memcpy(out + 2 * kLane - 8, &last, 8);
  } else {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), low);
    const auto last = static_cast<uint64_t>(_mm_cvtsi128_si64(high));
    const auto first = static_cast<uint32_t>(last);
    const auto rest = static_cast<uint16_t>(last >> 32);
    __builtin_memcpy(out + kLane, &first, 4), __builtin_memcpy(out + kLane + 4, &rest, 2);
  }
}

/// Each code's two bytes become a word; a product moves the code to its top.
template <int kBits>
LB_HD void unpack_turn(const uint8_t* in, uint8_t* codes) {
  constexpr int kLane = 2 * kBits;  // bytes of 16 codes
  // The upper lane's bytes are loaded so that the last one is the group's last.
  constexpr int kSecond = kBits < 4 ? 0 : 2 * kLane - 16;
  struct Order {
    static constexpr int first(int i, int eight) {  // the byte in which the word's code begins
      return (i < 16 ? 0 : kLane - kSecond) + (eight * 8 + i % 16 / 2) * kBits / 8 + i % 2;
    }
  };
  constexpr ByteOrder<32> kLow([](int i) { return Order::first(i, 0); });
  constexpr ByteOrder<32> kHigh(
      [](int i) { return Order::first(i, 1) < 16 ? Order::first(i, 1) : 15; });
  constexpr ByteOrder<32> kTop([](int i) {  // factors of 16 bits
    const int factor = 1 << (16 - kBits - i % 16 / 2 * kBits % 8);
    return i % 2 ? factor >> 8 : factor & 255;
  });
  const __m256i bytes = _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + kSecond)), 1);
  const __m256i low = _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, byte_order(kLow)),
                                         byte_order(kTop)),
                high = _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, byte_order(kHigh)),
                                          byte_order(kTop));
  const __m256i both =
      _mm256_packus_epi16(_mm256_srli_epi16(low, 16 - kBits), _mm256_srli_epi16(high, 16 - kBits));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), both);
}

#endif

/// Packs or unpacks whole turns of n codes. Returns how many.
template <int kBits>
LB_HD int pack_turns(const uint8_t* codes, uint8_t* out, int n) {
  int i = 0;
  for (; i + kPackTurn <= n; i += kPackTurn, out += kPackTurn / 8 * kBits)
    pack_turn<kBits>(codes + i, out);
  return i;
}
template <int kBits>
LB_HD int unpack_turns(const uint8_t* in, uint8_t* codes, int n) {
  // With 32 codes of 3 bits, the 16 bytes that are read are four more than they have.
  constexpr int kRead = kPackTurn == 32 && kBits == 3 ? 48 : kPackTurn;
  int i = 0;
  for (; i + kRead <= n; i += kPackTurn, in += kPackTurn / 8 * kBits)
    unpack_turn<kBits>(in, codes + i);
  return i;
}

}  // namespace lowbit
