// Tensors of a GPU whose memory is not the GPU's own. To torch they are like any other of the GPU:
// what copies, saves, gathers or frees them waits for the streams it must, and the operators take
// them as they are.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <vector>

#include "cuda/library.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

/// Blocks whose tensors ended while a graph was captured: to free them then would end the capture.
struct Ended {
  std::mutex mutex;
  std::vector<CudaBlock> blocks;
};
Ended& ended() {
  static auto* all = new Ended;  // tensors may end behind the end of static objects
  return *all;
}

/// Of this thread, also where that cannot be told; a capture of another thread is not seen.
bool captures(const cuda::Library& library, int device) {
  bool yes = false;
  void* const stream = library.current_stream(device);
  return library.retain(device, stream, nullptr, nullptr, &yes) != nullptr || yes;
}

/// Frees what has ended on the device, which is the current one, unless a graph is captured there.
void free_ended(const cuda::Library& library, int device) {
  std::vector<CudaBlock> blocks;
  {
    Ended& all = ended();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto there = [&](const CudaBlock& block) { return block.device == device; };
    if (std::none_of(all.blocks.begin(), all.blocks.end(), there) || captures(library, device))
      return;
    const auto rest =
        std::stable_partition(all.blocks.begin(), all.blocks.end(), std::not_fn(there));
    blocks.assign(rest, all.blocks.end());
    all.blocks.erase(rest, all.blocks.end());
  }
  for (const CudaBlock& block : blocks) library.free(&block);
}

int64_t bytes_of(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  if (dtype == ScalarType::Long) return 8;
  if (dtype == ScalarType::Float || dtype == ScalarType::Int) return 4;
  return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ? 2 : 1;
}

/// Called where a tensor ends, which may be behind the end of CUDA: then nothing is left to free.
void free(const CudaBlock& block) noexcept {
  try {
    torch::stable::accelerator::DeviceGuard guard(block.device);
    {
      const std::lock_guard<std::mutex> lock(ended().mutex);
      ended().blocks.push_back(block);
    }
    free_ended(cuda::library(), block.device);
  } catch (...) {
  }
}

/// A contiguous tensor that nothing is written to yet; freed with its last owner.
Tensor allocate(std::vector<int64_t> size, std::string dtype, int64_t device, std::string memory) {
  const char* op = "lowbit::allocate";
  STD_TORCH_CHECK(memory == "pinned" || memory == "managed", op, ": memory is 'pinned' or ",
                  "'managed', not '", memory, "'");
  const torch::headeronly::ScalarType type = scalar_type(dtype.c_str());
  std::vector<int64_t> strides(size.size());
  int64_t numel = 1;
  for (size_t d = size.size(); d-- > 0;) {
    strides[d] = numel;
    STD_TORCH_CHECK(size[d] > 0 && !__builtin_mul_overflow(numel, size[d], &numel), op,
                    ": dimension ", d, " has the length ", size[d]);
  }
  int64_t bytes = 0;
  STD_TORCH_CHECK(!__builtin_mul_overflow(numel, bytes_of(type), &bytes), op, ": ", numel,
                  " elements are too many");
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, op, ": ", library.error);
  CudaBlock block{static_cast<int>(device), memory == "managed" ? kManaged : kPinned, bytes,
                  nullptr};
  torch::stable::accelerator::DeviceGuard guard(block.device);
  free_ended(library, block.device);
  const char* error = library.allocate(&block);
  STD_TORCH_CHECK(error == nullptr, op, ": ", error);
  // torch asks CUDA which device the address belongs to: the one that was current, which is this.
  const torch::stable::Device on(torch::headeronly::DeviceType::CUDA,
                                 static_cast<torch::stable::DeviceIndex>(device));
  return torch::stable::from_blob(block.at, size, strides, on, type,
                                  [block](void*) { free(block); });
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("allocate(int[] size, str dtype, int device, str memory) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("allocate", LOWBIT_OPERATOR(allocate));
}
