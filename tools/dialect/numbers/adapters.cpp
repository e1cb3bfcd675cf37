#include "dialect/numbers/adapters.h"

#include <algorithm>
#include <cstring>

#include "core/half.h"
#include "dialect/numbers/floats.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {

std::shared_ptr<Source> float16_source(std::shared_ptr<Floats> values) {
  return source_by([values = std::move(values), x = std::vector<float>()](
                       uint64_t first, uint64_t count, void* out) mutable -> Status {
    const ScratchBuffer memory(x);
    x.resize(count);
    RETURN_IF_ERROR(values->read(first, count, x.data()));
    for (uint64_t i = 0; i < count; ++i) {
      const uint16_t h = half_nearest(x[i]);
      std::memcpy(static_cast<char*>(out) + 2 * i, &h, 2);
    }
    return fine();
  });
}

std::shared_ptr<Floats> float16_bits(std::shared_ptr<Source> source) {
  return floats_by([source = std::move(source), bits = std::vector<uint16_t>()](
                       uint64_t first, uint64_t count, float* out) mutable -> Status {
    const ScratchBuffer memory(bits);
    bits.resize(count);
    RETURN_IF_ERROR(source->read(first, count, bits.data()));
    for (uint64_t i = 0; i < count; ++i) out[i] = half_to_float(bits[i]);
    return fine();
  });
}

std::shared_ptr<Floats> float32_floats(std::shared_ptr<Source> source) {
  return floats_by([source = std::move(source)](uint64_t first, uint64_t count, float* out) {
    return source->read(first, count, out);
  });
}

std::shared_ptr<Source> mapped_bytes(std::shared_ptr<Source> source,
                                     const std::array<uint8_t, 256>& table) {
  return source_by(
      [source = std::move(source), table](uint64_t first, uint64_t count, void* out) -> Status {
        RETURN_IF_ERROR(source->read(first, count, out));
        auto* bytes = static_cast<uint8_t*>(out);
        for (uint64_t i = 0; i < count; ++i) bytes[i] = table[bytes[i]];
        return fine();
      });
}

std::array<uint8_t, 256> moved_bytes(int by) {
  std::array<uint8_t, 256> table{};
  for (int b = 0; b < 256; ++b) table[static_cast<size_t>(b)] = static_cast<uint8_t>(b + by);
  return table;
}

std::shared_ptr<Source> interleaved(std::shared_ptr<Floats> even, std::shared_ptr<Floats> odd) {
  const std::array of = {std::move(even), std::move(odd)};
  return source_by([of, x = std::array<std::vector<float>, 2>()](uint64_t first, uint64_t count,
                                                                 void* out) mutable -> Status {
    const uint64_t begin = first / 2, end = (first + count + 1) / 2;
    const ScratchBuffer memory(x[0], x[1]);
    for (size_t k = 0; k < 2; ++k) {
      x[k].resize(end - begin);
      RETURN_IF_ERROR(of[k]->read(begin, end - begin, x[k].data()));
    }
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t at = first + i;
      std::memcpy(static_cast<char*>(out) + 4 * i, &x[at % 2][at / 2 - begin], 4);
    }
    return fine();
  });
}

std::shared_ptr<Source> every_other(std::shared_ptr<Source> source, uint64_t k) {
  return source_by([source = std::move(source), k, both = std::vector<float>()](
                       uint64_t first, uint64_t count, void* out) mutable -> Status {
    const ScratchBuffer memory(both);
    both.resize(2 * count);
    RETURN_IF_ERROR(source->read(2 * first, 2 * count, both.data()));
    for (uint64_t i = 0; i < count; ++i) static_cast<float*>(out)[i] = both[2 * i + k];
    return fine();
  });
}

std::shared_ptr<Source> bytes_of_words(std::shared_ptr<Source> source) {
  return source_by([source = std::move(source), words = std::vector<uint16_t>()](
                       uint64_t first, uint64_t count, void* out) mutable -> Status {
    const uint64_t begin = first / 2, end = (first + count + 1) / 2;
    const ScratchBuffer memory(words);
    words.resize(end - begin);
    RETURN_IF_ERROR(source->read(begin, end - begin, words.data()));
    std::memcpy(out, reinterpret_cast<const char*>(words.data()) + first % 2, count);
    return fine();
  });
}

std::shared_ptr<Source> words_of_bytes(std::shared_ptr<Source> source) {
  return source_by([source = std::move(source)](uint64_t first, uint64_t count, void* out) {
    return source->read(2 * first, 2 * count, out);
  });
}

std::shared_ptr<Source> filled_up(std::shared_ptr<Source> source, uint64_t stored, uint8_t filler) {
  return source_by(
      [source = std::move(source), stored, filler](uint64_t first, uint64_t count, void* out) {
        const uint64_t stop = std::clamp(stored, first, first + count);
        std::memset(static_cast<char*>(out) + (stop - first), filler, first + count - stop);
        return stop > first ? source->read(first, stop - first, out) : fine();
      });
}

std::shared_ptr<Source> swapped_nibbles(std::shared_ptr<Source> source) {
  std::array<uint8_t, 256> table;
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(i >> 4 | i << 4);
  return mapped_bytes(std::move(source), table);
}

std::shared_ptr<Source> part_of_source(std::shared_ptr<Source> source, uint64_t begin) {
  return source_by([source = std::move(source), begin](uint64_t first, uint64_t count, void* out) {
    return source->read(begin + first, count, out);
  });
}

std::shared_ptr<Source> held_floats(const std::vector<float>& numbers) {
  return constant_source(
      std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)),
      sizeof(float));
}

std::shared_ptr<Source> bytes_of_int32(std::shared_ptr<Source> source) {
  return source_by([source = std::move(source), codes = std::vector<int32_t>()](
                       uint64_t first, uint64_t count, void* out) mutable -> Status {
    const ScratchBuffer memory(codes);
    codes.resize(count);
    RETURN_IF_ERROR(source->read(first, count, codes.data()));
    for (uint64_t i = 0; i < count; ++i)
      static_cast<uint8_t*>(out)[i] = static_cast<uint8_t>(std::clamp(codes[i], 0, 255));
    return fine();
  });
}

}  // namespace lowbit::ckpt
