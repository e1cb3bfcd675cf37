#include "dialect/numbers/adapters.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/half.h"
#include "dialect/numbers/floats.h"
#include "io/scratch_buffer.h"

namespace lowbit::ckpt {
namespace {

class HalfSource : public Source {
 public:
  explicit HalfSource(std::shared_ptr<Floats> values) : values_(std::move(values)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const ScratchBuffer memory(x_);
    x_.resize(count);
    RETURN_IF_ERROR(values_->read(first, count, x_.data()));
    for (uint64_t i = 0; i < count; ++i) {
      const uint16_t h = half_nearest(x_[i]);
      std::memcpy(static_cast<char*>(out) + 2 * i, &h, 2);
    }
    return fine();
  }

 private:
  const std::shared_ptr<Floats> values_;
  std::vector<float> x_;
};

class HalfBits : public Floats {
 public:
  explicit HalfBits(std::shared_ptr<Source> source) : source_(std::move(source)) {}
  Status read(uint64_t first, uint64_t count, float* out) override {
    const ScratchBuffer memory(bits_);
    bits_.resize(count);
    RETURN_IF_ERROR(source_->read(first, count, bits_.data()));
    for (uint64_t i = 0; i < count; ++i) out[i] = half_to_float(bits_[i]);
    return fine();
  }

 private:
  const std::shared_ptr<Source> source_;
  std::vector<uint16_t> bits_;
};

class SourceFloats : public Floats {
 public:
  explicit SourceFloats(std::shared_ptr<Source> source) : source_(std::move(source)) {}
  Status read(uint64_t first, uint64_t count, float* out) override {
    return source_->read(first, count, out);
  }

 private:
  const std::shared_ptr<Source> source_;
};

class MappedBytes : public Source {
 public:
  MappedBytes(std::shared_ptr<Source> source, const std::array<uint8_t, 256>& table)
      : source_(std::move(source)), table_(table) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    RETURN_IF_ERROR(source_->read(first, count, out));
    auto* bytes = static_cast<uint8_t*>(out);
    for (uint64_t i = 0; i < count; ++i) bytes[i] = table_[bytes[i]];
    return fine();
  }

 private:
  const std::shared_ptr<Source> source_;
  const std::array<uint8_t, 256> table_;
};

class Interleaved : public Source {
 public:
  Interleaved(std::shared_ptr<Floats> a, std::shared_ptr<Floats> b)
      : of_{std::move(a), std::move(b)} {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const uint64_t begin = first / 2, end = (first + count + 1) / 2;
    const ScratchBuffer memory(x_[0], x_[1]);
    for (size_t k = 0; k < 2; ++k) {
      x_[k].resize(end - begin);
      RETURN_IF_ERROR(of_[k]->read(begin, end - begin, x_[k].data()));
    }
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t at = first + i;
      std::memcpy(static_cast<char*>(out) + 4 * i, &x_[at % 2][at / 2 - begin], 4);
    }
    return fine();
  }

 private:
  const std::array<std::shared_ptr<Floats>, 2> of_;
  std::array<std::vector<float>, 2> x_;
};

class EveryOther : public Source {
 public:
  EveryOther(std::shared_ptr<Source> source, uint64_t k) : source_(std::move(source)), k_(k) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const ScratchBuffer memory(both_);
    both_.resize(2 * count);
    RETURN_IF_ERROR(source_->read(2 * first, 2 * count, both_.data()));
    for (uint64_t i = 0; i < count; ++i) static_cast<float*>(out)[i] = both_[2 * i + k_];
    return fine();
  }

 private:
  const std::shared_ptr<Source> source_;
  const uint64_t k_;
  std::vector<float> both_;
};

class BytesOfWords : public Source {
 public:
  explicit BytesOfWords(std::shared_ptr<Source> words) : source_(std::move(words)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const uint64_t begin = first / 2, end = (first + count + 1) / 2;
    const ScratchBuffer memory(words_);
    words_.resize(end - begin);
    RETURN_IF_ERROR(source_->read(begin, end - begin, words_.data()));
    std::memcpy(out, reinterpret_cast<const char*>(words_.data()) + first % 2, count);
    return fine();
  }

 private:
  const std::shared_ptr<Source> source_;
  std::vector<uint16_t> words_;
};

class Words : public Source {
 public:
  explicit Words(std::shared_ptr<Source> bytes) : source_(std::move(bytes)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    return source_->read(2 * first, 2 * count, out);
  }

 private:
  const std::shared_ptr<Source> source_;
};

class FilledUp : public Source {
 public:
  FilledUp(std::shared_ptr<Source> source, uint64_t count, uint8_t filler)
      : source_(std::move(source)), count_(count), filler_(filler) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const uint64_t stop = std::clamp(count_, first, first + count);
    std::memset(static_cast<char*>(out) + (stop - first), filler_, first + count - stop);
    return stop > first ? source_->read(first, stop - first, out) : fine();
  }

 private:
  const std::shared_ptr<Source> source_;
  const uint64_t count_;
  const uint8_t filler_;
};

class Shared : public Source {
 public:
  explicit Shared(std::shared_ptr<Source> source) : source_(std::move(source)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const std::lock_guard lock(mutex_);
    return source_->read(first, count, out);
  }

 private:
  std::mutex mutex_;
  const std::shared_ptr<Source> source_;
};

class SourcePart : public Source {
 public:
  SourcePart(std::shared_ptr<Source> source, uint64_t first)
      : source_(std::move(source)), first_(first) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    return source_->read(first_ + first, count, out);
  }

 private:
  const std::shared_ptr<Source> source_;
  const uint64_t first_;
};

class NarrowedCodes : public Source {
 public:
  explicit NarrowedCodes(std::shared_ptr<Source> s) : source_(std::move(s)) {}
  Status read(uint64_t first, uint64_t count, void* out) override {
    const ScratchBuffer memory(codes_);
    codes_.resize(count);
    RETURN_IF_ERROR(source_->read(first, count, codes_.data()));
    for (uint64_t i = 0; i < count; ++i)
      static_cast<uint8_t*>(out)[i] = static_cast<uint8_t>(std::clamp(codes_[i], 0, 255));
    return fine();
  }

 private:
  const std::shared_ptr<Source> source_;
  std::vector<int32_t> codes_;
};

}  // namespace

std::shared_ptr<Source> float16_source(std::shared_ptr<Floats> values) {
  return std::make_shared<HalfSource>(std::move(values));
}
std::shared_ptr<Floats> float16_bits(std::shared_ptr<Source> source) {
  return std::make_shared<HalfBits>(std::move(source));
}
std::shared_ptr<Floats> float32_floats(std::shared_ptr<Source> source) {
  return std::make_shared<SourceFloats>(std::move(source));
}
std::shared_ptr<Source> mapped_bytes(std::shared_ptr<Source> source,
                                     const std::array<uint8_t, 256>& table) {
  return std::make_shared<MappedBytes>(std::move(source), table);
}
std::array<uint8_t, 256> moved_bytes(int by) {
  std::array<uint8_t, 256> table{};
  for (int b = 0; b < 256; ++b) table[static_cast<size_t>(b)] = static_cast<uint8_t>(b + by);
  return table;
}
std::shared_ptr<Source> interleaved(std::shared_ptr<Floats> first, std::shared_ptr<Floats> second) {
  return std::make_shared<Interleaved>(std::move(first), std::move(second));
}
std::shared_ptr<Source> every_other(std::shared_ptr<Source> source, uint64_t k) {
  return std::make_shared<EveryOther>(std::move(source), k);
}
std::shared_ptr<Source> bytes_of_words(std::shared_ptr<Source> source) {
  return std::make_shared<BytesOfWords>(std::move(source));
}
std::shared_ptr<Source> words_of_bytes(std::shared_ptr<Source> source) {
  return std::make_shared<Words>(std::move(source));
}
std::shared_ptr<Source> filled_up(std::shared_ptr<Source> source, uint64_t count, uint8_t filler) {
  return std::make_shared<FilledUp>(std::move(source), count, filler);
}

std::shared_ptr<Source> swapped_nibbles(std::shared_ptr<Source> source) {
  std::array<uint8_t, 256> table;
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(i >> 4 | i << 4);
  return mapped_bytes(std::move(source), table);
}

std::shared_ptr<Source> part_of_source(std::shared_ptr<Source> shared, uint64_t first) {
  return std::make_shared<SourcePart>(std::move(shared), first);
}

std::shared_ptr<Source> shared_source(std::shared_ptr<Source> source) {
  return std::make_shared<Shared>(std::move(source));
}

std::shared_ptr<Source> held_floats(const std::vector<float>& numbers) {
  return constant_source(
      std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)),
      sizeof(float));
}

std::shared_ptr<Source> bytes_of_int32(std::shared_ptr<Source> source) {
  return std::make_shared<NarrowedCodes>(std::move(source));
}

}  // namespace lowbit::ckpt
