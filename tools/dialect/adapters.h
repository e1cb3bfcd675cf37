// Sources and values made of others: mapped, parted, narrowed. None knows whose they are.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "container/joined.h"
#include "dialect/coding.h"

namespace lowbit::ckpt {

/// Values rounded to float16, to the nearest.
std::shared_ptr<Source> float16_source(std::shared_ptr<Floats> values);
/// Float16 numbers by their bits, whatever dtype the leaf says they are.
std::shared_ptr<Floats> float16_bits(std::shared_ptr<Source> source);
/// Floats of a source of float32.
std::shared_ptr<Floats> float32_floats(std::shared_ptr<Source> source);
/// Bytes of a source by a table: byte b becomes table[b].
std::shared_ptr<Source> mapped_bytes(std::shared_ptr<Source> source,
                                     const std::array<uint8_t, 256>& table);
/// The table for that by which `by` is added to a byte.
std::array<uint8_t, 256> moved_bytes(int by);
/// Two sources of float32, taking turns.
std::shared_ptr<Source> interleaved(std::shared_ptr<Floats> first, std::shared_ptr<Floats> second);
/// Float32 elements k, k + 2, k + 4, ... of a source: one of the two that were interleaved.
std::shared_ptr<Source> every_other(std::shared_ptr<Source> source, uint64_t k);
/// Elements of two bytes as bytes, the lower first.
std::shared_ptr<Source> bytes_of_words(std::shared_ptr<Source> source);
/// Pairs of bytes as elements of two.
std::shared_ptr<Source> words_of_bytes(std::shared_ptr<Source> source);
/// The first `count` bytes of a source, and the same byte from there on.
std::shared_ptr<Source> filled_up(std::shared_ptr<Source> source, uint64_t count, uint8_t filler);
/// Bytes of two 4-bit codes with the codes exchanged.
std::shared_ptr<Source> swapped_nibbles(std::shared_ptr<Source> source);
/// Elements [first, ...) of a source that several read, each from its own thread.
std::shared_ptr<Source> part_of_source(std::shared_ptr<Source> shared, uint64_t first);
/// A source that several may read, each from its own thread.
std::shared_ptr<Source> shared_source(std::shared_ptr<Source> source);
/// Float32 numbers as a source that holds them.
std::shared_ptr<Source> held_floats(const std::vector<float>& numbers);

}  // namespace lowbit::ckpt
