#include "io/crc32.h"

#include <libdeflate.h>

namespace lowbit::ckpt {
namespace {

// Polynomials over GF(2) modulo the CRC's, bits reversed: the highest bit is the coefficient of 1.
constexpr uint32_t kPolynomial = 0xedb88320;

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t p = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) p ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;  // times x
  }
  return p;
}

}  // namespace

uint32_t crc32(uint32_t before, const void* data, uint64_t bytes) {
  return libdeflate_crc32(before, data, bytes);
}

// Appending n bytes multiplies what came before by x^(8n); the rest of the CRC's definition (its
// ones before and behind) cancels out.
uint32_t crc32_joined(uint32_t a, uint32_t b, uint64_t b_bytes) {
  uint32_t shift = 1u << 31;         // 1
  uint32_t square = 1u << (31 - 8);  // x^8, then its square, ...
  for (uint64_t n = b_bytes; n != 0; n >>= 1) {
    if ((n & 1) != 0) shift = product(shift, square);
    square = product(square, square);
  }
  return product(shift, a) ^ b;
}

}  // namespace lowbit::ckpt
