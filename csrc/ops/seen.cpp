#include "ops/seen.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace lowbit {
namespace {

int32_t dtype_number(const Tensor& t) {
  int32_t number = 0;
  // Not by a macro of torch's: its name is not the same in all of the versions that build this.
  if (aoti_torch_get_dtype(t.get(), &number) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("torch has no dtype for a tensor that is stepped");
  return number;
}

/// The word at an address.
const char* word_at(const void* at) {
  const char* word = nullptr;
  if (at != nullptr) std::memcpy(&word, at, sizeof(word));
  return word;
}

constexpr int64_t kAhead = 16;
inline void fetch(const char* at, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i);
}

}  // namespace

void SeenTensors::see(const Tensors& tensors) {
  for (const Tensor& t : tensors) {
    // Asked for writing: memory that is shared until it is written gets a new address.
    Seen seen{t.mutable_data_ptr(), t.numel(), dtype_number(t), Device(t), nullptr, nullptr};
    // A tensor is a pointer, to an object whose third word points to its storage. In a torch where
    // that is otherwise, other memory is fetched in vain.
    seen.tensor = word_at(t.get());
    seen.memory = seen.tensor == nullptr ? nullptr : word_at(seen.tensor + 2 * sizeof(void*));
    tensors_.push_back(t), seen_.push_back(seen);
  }
}

void SeenTensors::see_numbers(const Tensors& numbers) {
  for (const Tensor& t : numbers) {
    STD_TORCH_CHECK(
        t.is_cpu() && t.numel() == 1 && t.scalar_type() == torch::headeronly::ScalarType::Long,
        "lowbit: a number to watch must be one int64 on the CPU");
    const auto* const at = static_cast<const int64_t*>(t.mutable_data_ptr());
    numbers_.push_back({at, *at});
  }
  see(numbers);
}

bool SeenTensors::unchanged() const {
  const auto count = static_cast<int64_t>(tensors_.size());
  std::atomic<bool> good = true;
  constexpr int64_t kGrain = 2048;
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && good.load(std::memory_order_relaxed); ++i) {
      if (i + kAhead < end) {
        const auto next = static_cast<size_t>(i + kAhead);
        fetch(reinterpret_cast<const char*>(tensors_[next].get()), 1);
        fetch(seen_[next].tensor, 3), fetch(seen_[next].memory, 2);
      }
      const Tensor& t = tensors_[static_cast<size_t>(i)];
      const Seen& seen = seen_[static_cast<size_t>(i)];
      if (t.mutable_data_ptr() != seen.data || t.numel() != seen.numel ||
          dtype_number(t) != seen.dtype || !t.is_contiguous() ||
          (seen.data == nullptr && !seen.device.has(t)))
        good.store(false, std::memory_order_relaxed);
    }
  });
  return good && std::all_of(numbers_.begin(), numbers_.end(),
                             [](const Number& n) { return *n.at == n.value; });
}

}  // namespace lowbit
