// State outside the device's own memory (abi.h). Kernels step it in place: the warp that computes
// with a byte reads and writes it once. The bus is therefore busy in both directions while other
// warps compute, and nothing is copied ahead or waited for. Host code; callers restore the current
// device.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <mutex>

#include "cuda/abi.h"
#include "cuda/explain.h"

namespace lowbit::cuda {
namespace {

/// The managed blocks of a device by address, and the progress of the prefetch hints for them.
struct Managed {
  std::map<uintptr_t, int64_t> bytes;
  uintptr_t next = 0;  // end of the last hint
  int64_t left = 0;    // bytes without a hint in this round
  int calls = 0;       // since the end of the last round

  void begin_round() {
    left = 0;
    for (const auto& block : bytes) left += block.second;
    calls = 0;
  }
};
struct Registry {
  std::mutex mutex;
  std::map<int, Managed> of;
};
/// Never destroyed: tensors may be freed after static objects are destroyed.
Registry& registry() {
  static auto* kept = new Registry;
  return *kept;
}

#if CUDART_VERSION >= 13000
cudaMemLocation location(int device) {
  cudaMemLocation at{};
  at.type = cudaMemLocationTypeDevice;
  at.id = device;
  return at;
}
cudaError_t prefetch_range(uintptr_t at, int64_t bytes, int device, void* stream) {
  return cudaMemPrefetchAsync(reinterpret_cast<void*>(at), static_cast<size_t>(bytes),
                              location(device), 0, static_cast<cudaStream_t>(stream));
}
#else
int location(int device) { return device; }
cudaError_t prefetch_range(uintptr_t at, int64_t bytes, int device, void* stream) {
  return cudaMemPrefetchAsync(reinterpret_cast<void*>(at), static_cast<size_t>(bytes), device,
                              static_cast<cudaStream_t>(stream));
}
#endif

const char* pin(CudaBlock& block) {
  char doing[96];
  std::snprintf(doing, sizeof doing, "pinning %lld bytes of the host's memory",
                static_cast<long long>(block.bytes));
  return explain(cudaHostAlloc(&block.at, static_cast<size_t>(block.bytes),
                               cudaHostAllocPortable | cudaHostAllocMapped),
                 doing);
}

/// Maps the pages into the device wherever they are. Kernels then read and write pages on the host
/// over the bus, and page faults do not move them; `prefetch` does, if there is room.
const char* manage(CudaBlock& block) {
  int concurrent = 0;
  if (const char* error = explain(
          cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, block.device),
          "asking for managed memory"))
    return error;
  if (concurrent == 0)
    return "this GPU or its driver cannot share managed memory with the host while kernels run "
           "(cudaDevAttrConcurrentManagedAccess is 0, as on Windows and WSL); take "
           "state_memory='pinned'";
  const auto bytes = static_cast<size_t>(block.bytes);
  char doing[96];
  std::snprintf(doing, sizeof doing, "taking %lld bytes of managed memory",
                static_cast<long long>(block.bytes));
  if (const char* error = explain(cudaMallocManaged(&block.at, bytes, cudaMemAttachGlobal), doing))
    return error;
  const cudaError_t advised =
      cudaMemAdvise(block.at, bytes, cudaMemAdviseSetAccessedBy, location(block.device));
  if (advised != cudaSuccess) {
    static_cast<void>(cudaFree(block.at));
    block.at = nullptr;
    return explain(advised, "mapping managed memory");
  }
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  Managed& managed = r.of[block.device];
  managed.bytes[reinterpret_cast<uintptr_t>(block.at)] = block.bytes;
  managed.begin_round();
  return nullptr;
}

const char* allocate(CudaBlock& block) {
  block.at = nullptr;
  if (const char* error = explain(cudaSetDevice(block.device), "choosing the device")) return error;
  const char* error = block.memory == kManaged ? manage(block) : pin(block);
  if (error != nullptr)
    static_cast<void>(cudaGetLastError());  // clears the error for later callers
  return error;
}

const char* release(const CudaBlock& block) {
  if (block.memory == kManaged) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    Managed& managed = r.of[block.device];
    managed.bytes.erase(reinterpret_cast<uintptr_t>(block.at));
    managed.begin_round();
  }
  cudaError_t error = cudaSetDevice(block.device);
  // A kernel may still step it: this memory does not come from torch's allocator, which tracks
  // streams.
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  const cudaError_t freed = block.memory == kManaged ? cudaFree(block.at) : cudaFreeHost(block.at);
  if (error == cudaSuccess) error = freed;
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return explain(error, "freeing state");
}

constexpr int kHints = 64;           // per call
constexpr int kCalls = 128;          // between two rounds of hints
constexpr int kSpare = 16;           // this fraction of the device's memory, 1 / kSpare, stays free
constexpr int64_t kPage = 64 << 10;  // granularity of hints

/// Gives hints for the blocks after those of the last call, as far as the device has free memory.
/// No block therefore evicts another, and after some calls all that fit are on the device. A round
/// ends when every byte had a hint or no memory is free. The driver is then not queried for many
/// calls, since each query takes tens of microseconds; the next round brings back evicted pages.
/// Allocating or freeing a block also begins a round. Nothing happens during graph capture, because
/// a graph cannot contain hints.
const char* prefetch(int device, void* stream) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.of.find(device);
  if (found == r.of.end() || found->second.bytes.empty()) return nullptr;
  Managed& managed = found->second;
  if (managed.left == 0 && managed.calls < kCalls - 1) {
    ++managed.calls;
    return nullptr;
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const char* error =
          explain(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture),
                  "looking at a stream"))
    return error;
  if (capture != cudaStreamCaptureStatusNone) return nullptr;
  if (const char* error = explain(cudaSetDevice(device), "choosing the device")) return error;
  size_t free = 0, total = 0;
  if (const char* error = explain(cudaMemGetInfo(&free, &total), "asking for free memory"))
    return error;
  if (managed.left == 0) managed.begin_round();
  int64_t room = static_cast<int64_t>(free) - static_cast<int64_t>(total / kSpare);
  int64_t& left = managed.left;
  for (int i = 0; i < kHints && left > 0 && room >= kPage; ++i) {
    auto block = managed.bytes.upper_bound(managed.next);
    if (block != managed.bytes.begin() &&
        std::prev(block)->first + static_cast<uintptr_t>(std::prev(block)->second) > managed.next) {
      --block;  // the last hint ended inside this block
    } else {
      if (block == managed.bytes.end()) block = managed.bytes.begin();
      managed.next = block->first;
    }
    const auto rest =
        static_cast<int64_t>(block->first + static_cast<uintptr_t>(block->second) - managed.next);
    const int64_t bytes = std::min({rest, left, room - room % kPage});
    if (const char* error =
            explain(prefetch_range(managed.next, bytes, device, stream), "moving managed memory"))
      return error;
    managed.next += static_cast<uintptr_t>(bytes);
    left -= bytes, room -= bytes;
  }
  if (room < kPage) left = 0;
  return nullptr;
}

}  // namespace
}  // namespace lowbit::cuda

#define LB_EXPORT extern "C" __attribute__((visibility("default")))

LB_EXPORT const char* lowbit_cuda_allocate(lowbit::CudaBlock* block) {
  return lowbit::cuda::allocate(*block);
}
LB_EXPORT const char* lowbit_cuda_free(const lowbit::CudaBlock* block) {
  return lowbit::cuda::release(*block);
}
LB_EXPORT const char* lowbit_cuda_prefetch(int device, void* stream) {
  return lowbit::cuda::prefetch(device, stream);
}
