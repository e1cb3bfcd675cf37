#include "io/stream_copy.h"

#include <algorithm>
#include <cstring>

#include "io/parallel.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 4u << 20;      // bytes that a thread copies at a time
constexpr uint64_t kMinStream = 1u << 14;  // shorter copies may stay in the caches

constexpr uint64_t kLine = 64;

#ifdef __SSE2__
/// Whole cache lines, to the beginning of one.
void stream_lines(char* to, const char* from, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                  c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}
/// Before another thread may read what was streamed.
void finish_streaming() { _mm_sfence(); }
#else
void stream_lines(char* to, const char* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
void finish_streaming() {}
#endif

}  // namespace

void stream_copy(const MemoryCopy& c) {
  if (c.bytes < kMinStream) {
    std::memcpy(c.to, c.from, c.bytes);
    return;
  }
  const uint64_t head = -reinterpret_cast<uintptr_t>(c.to) % kLine;
  const uint64_t lines = (c.bytes - head) / kLine * kLine;
  std::memcpy(c.to, c.from, head);
  stream_lines(c.to + head, c.from + head, lines);
  std::memcpy(c.to + head + lines, c.from + head + lines, c.bytes - head - lines);
  finish_streaming();
}

Status stream_copy(const std::vector<MemoryCopy>& copies, int threads) {
  std::vector<MemoryCopy> pieces;
  for (const MemoryCopy& c : copies) {
    for (uint64_t at = 0; at < c.bytes; at += kPiece)
      pieces.push_back({c.to + at, c.from + at, std::min(kPiece, c.bytes - at)});
  }
  return parallel(pieces.size(), threads, [&](size_t i) {
    stream_copy(pieces[i]);
    return fine();
  });
}

}  // namespace lowbit::ckpt
