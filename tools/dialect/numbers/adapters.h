// Sources and values made from others: mapped, split, interleaved, narrowed. They know no library.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "container/document/joined.h"
#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// Values rounded to the nearest float16.
std::shared_ptr<Source> float16_source(std::shared_ptr<Floats> values);
/// The float16 values of 16-bit elements, whatever their dtype.
std::shared_ptr<Floats> float16_bits(std::shared_ptr<Source> source);
/// The values of float32 elements.
std::shared_ptr<Floats> float32_floats(std::shared_ptr<Source> source);
/// Bytes through a table: byte b becomes table[b].
std::shared_ptr<Source> mapped_bytes(std::shared_ptr<Source> source,
                                     const std::array<uint8_t, 256>& table);
/// The table that adds `by` to a byte.
std::array<uint8_t, 256> moved_bytes(int by);
/// Float32 elements of two sources, alternating.
std::shared_ptr<Source> interleaved(std::shared_ptr<Floats> even, std::shared_ptr<Floats> odd);
/// Float32 elements k, k + 2, k + 4, ...: one of two interleaved sources.
std::shared_ptr<Source> every_other(std::shared_ptr<Source> source, uint64_t k);
/// Two-byte elements as bytes, little-endian.
std::shared_ptr<Source> bytes_of_words(std::shared_ptr<Source> source);
/// Pairs of bytes as two-byte elements, little-endian.
std::shared_ptr<Source> words_of_bytes(std::shared_ptr<Source> source);
/// int32 codes from 0 to 255 as bytes; others are clamped.
std::shared_ptr<Source> bytes_of_int32(std::shared_ptr<Source> source);
/// The first `stored` bytes of a source, then `filler` without end.
std::shared_ptr<Source> filled_up(std::shared_ptr<Source> source, uint64_t stored, uint8_t filler);
/// Bytes with their two 4-bit codes swapped.
std::shared_ptr<Source> swapped_nibbles(std::shared_ptr<Source> source);
/// Elements from `begin` on of a source.
std::shared_ptr<Source> part_of_source(std::shared_ptr<Source> source, uint64_t begin);
/// Float32 elements that are held in memory.
std::shared_ptr<Source> held_floats(const std::vector<float>& numbers);

}  // namespace lowbit::ckpt
