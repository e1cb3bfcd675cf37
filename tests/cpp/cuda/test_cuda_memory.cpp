// The placement of state outside the device's own memory, against a fake CUDA runtime that logs
// calls: the calls, their order, and that they never exceed the free memory.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"

// ---- the runtime ----
#define CUDART_VERSION 13000
enum cudaError_t {
  cudaSuccess,
  cudaErrorMemoryAllocation,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidDeviceFunction,
  cudaErrorUnsupportedPtxVersion,
  cudaErrorInsufficientDriver
};
enum cudaDeviceAttr { cudaDevAttrConcurrentManagedAccess };
enum cudaMemoryAdvise { cudaMemAdviseSetReadMostly, cudaMemAdviseSetAccessedBy };
enum cudaMemLocationType { cudaMemLocationTypeInvalid, cudaMemLocationTypeDevice };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
using cudaStream_t = void*;
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaMemAttachGlobal = 1;

namespace {

struct Hint {
  uintptr_t at;
  int64_t bytes;
  int device;
};
struct Fake {
  std::string log;    // one letter per call
  std::string fails;  // letters of calls that fail
  bool concurrent = true, capturing = false;
  size_t free = 0, total = 0;
  int device = -1;
  uintptr_t next = uintptr_t{1} << 40;
  std::map<uintptr_t, size_t> here;
  std::vector<Hint> hints;

  cudaError_t call(char letter) {
    log += letter;
    return fails.find(letter) == std::string::npos ? cudaSuccess : cudaErrorMemoryAllocation;
  }
  cudaError_t take(void** at, size_t bytes, char letter) {
    const cudaError_t error = call(letter);
    if (error != cudaSuccess) return error;
    *at = reinterpret_cast<void*>(next);
    here[next] = bytes;
    next += (bytes + 0xffff) / 0x10000 * 0x10000;
    return cudaSuccess;
  }
  cudaError_t give(void* at, char letter) {
    const cudaError_t error = call(letter);
    return here.erase(reinterpret_cast<uintptr_t>(at)) == 1 ? error : cudaErrorMemoryAllocation;
  }
} fake;

const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
cudaError_t cudaGetLastError() { return fake.call('l'); }
cudaError_t cudaSetDevice(int device) {
  fake.device = device;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned flags) {
  return flags == (cudaHostAllocPortable | cudaHostAllocMapped) ? fake.take(at, bytes, 'H')
                                                                : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocManaged(void** at, size_t bytes, unsigned) {
  return fake.take(at, bytes, 'M');
}
cudaError_t cudaFreeHost(void* at) { return fake.give(at, 'h'); }
cudaError_t cudaFree(void* at) { return fake.give(at, 'm'); }
cudaError_t cudaDeviceSynchronize() { return fake.call('s'); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = fake.concurrent;
  return cudaSuccess;
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise advice, cudaMemLocation at) {
  const bool good = advice == cudaMemAdviseSetAccessedBy && at.id == fake.device;
  return good ? fake.call('a') : cudaErrorMemoryAllocation;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = fake.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = fake.free, *total = fake.total;
  return fake.call('i');
}
cudaError_t cudaMemPrefetchAsync(const void* at, size_t bytes, cudaMemLocation to, unsigned,
                                 cudaStream_t) {
  fake.hints.push_back({reinterpret_cast<uintptr_t>(at), static_cast<int64_t>(bytes), to.id});
  return fake.call('p');
}

}  // namespace

#include "cuda/memory.cu"

namespace {

using lowbit::CudaBlock;
using lowbit::kManaged;
using lowbit::kPinned;

constexpr int64_t kMiB = 1 << 20;

/// As `check`, with the calls that the runtime got.
void check(bool good, const char* what) {
  ::check(good, std::string(what) + " (log: " + fake.log + ")");
}
void begin() {
  const uintptr_t next = fake.next;
  fake = Fake{};
  fake.next = next;
}
bool says(const char* error, const char* word) {
  return error != nullptr && std::strstr(error, word) != nullptr;
}
CudaBlock taken(int memory, int64_t bytes, int device = 0) {
  CudaBlock block{device, memory, bytes, nullptr};
  check(lowbit_cuda_allocate(&block) == nullptr && block.at != nullptr, "memory is there");
  return block;
}
void given(const CudaBlock& block) { check(lowbit_cuda_free(&block) == nullptr, "it is freed"); }

void test_blocks() {
  begin();
  CudaBlock block = taken(kPinned, 3 * kMiB, 1);
  check(fake.device == 1 && fake.log == "H", "pinned memory is asked for once, on its device");
  fake.free = fake.total = static_cast<size_t>(1) << 30;
  check(lowbit_cuda_prefetch(1, nullptr) == nullptr && fake.log == "H", "it takes no hints");
  fake.device = 0;
  given(block);
  check(fake.device == 1 && fake.log == "Hsh", "the device is waited for before it is freed");

  begin();
  block = taken(kManaged, 3 * kMiB, 1);
  given(block);
  check(fake.log == "Masm", "managed memory is mapped; the device is waited for");
  check(fake.here.empty(), "nothing is left");
}

void test_refusals() {
  begin();
  fake.fails = "H";
  CudaBlock block{0, kPinned, 12345678, nullptr};
  const char* error = lowbit_cuda_allocate(&block);
  check(says(error, "pinning 12345678 bytes") && says(error, "out of memory"),
        "the message has the bytes");
  check(fake.log == "Hl", "the error is not left to others");

  begin();
  fake.fails = "M", block.memory = kManaged;
  check(says(lowbit_cuda_allocate(&block), "taking 12345678 bytes of managed"), "so of managed");

  begin();
  fake.concurrent = false;
  check(says(lowbit_cuda_allocate(&block), "state_memory='pinned'"), "what to do without paging");
  check(fake.here.empty(), "nothing was taken");

  begin();
  fake.fails = "a";
  check(lowbit_cuda_allocate(&block) != nullptr && fake.here.empty(), "unmapped memory is freed");
  fake.free = fake.total = static_cast<size_t>(1) << 30;
  fake.fails.clear(), fake.log.clear();
  check(lowbit_cuda_prefetch(0, nullptr) == nullptr && fake.hints.empty(), "and takes no hints");

  begin();
  block = taken(kPinned, kMiB);
  fake.fails = "s";
  check(says(lowbit_cuda_free(&block), "freeing"), "the message has a failed synchronization");
  check(fake.here.empty() && fake.log == "Hshl", "it is freed all the same");
}

/// As many calls as between two rounds of hints. None of them may query the driver.
void wait_a_round(int device = 0) {
  const std::string before = fake.log;
  const size_t hints = fake.hints.size();
  bool good = true;
  for (int i = 0; i + 1 < lowbit::cuda::kCalls; ++i)
    good &= lowbit_cuda_prefetch(device, nullptr) == nullptr;
  check(good && fake.log == before && fake.hints.size() == hints,
        "between rounds the driver is asked nothing");
}

void test_hints() {
  begin();
  std::vector<CudaBlock> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(taken(kManaged, 4 * kMiB));
  const CudaBlock other = taken(kManaged, 4 * kMiB, 1);
  const auto hints = [&](size_t room) {
    fake.hints.clear();
    fake.total = static_cast<size_t>(16 * kMiB), fake.free = room + kMiB;  // a sixteenth stays free
    check(lowbit_cuda_prefetch(0, nullptr) == nullptr, "hints are taken");
    int64_t bytes = 0;
    for (const Hint& hint : fake.hints) bytes += hint.bytes;
    return bytes;
  };
  check(hints(100 * kMiB) == 20 * kMiB && fake.hints.size() == 5, "all come where all fit");
  wait_a_round();
  check(hints(0) == 0, "nothing is asked for where nothing is free");
  wait_a_round();
  check(hints(static_cast<size_t>(6 * kMiB)) == 6 * kMiB, "no more than there is room for");
  check(fake.hints.size() == 2 && fake.hints[1].bytes == 2 * kMiB, "a block may come in parts");
  wait_a_round();
  check(hints(static_cast<size_t>(6 * kMiB)) == 6 * kMiB &&
            fake.hints[0].at == reinterpret_cast<uintptr_t>(blocks[1].at) + 2 * kMiB,
        "the next call continues where the last one ended");
  wait_a_round();
  fake.capturing = true, fake.log.clear();
  check(hints(100 * kMiB) == 0 && fake.log.empty(),
        "a graph holds no hints, and nobody asks for memory while it is captured");
  fake.capturing = false;
  check(hints(100 * kMiB) == 20 * kMiB, "they come behind it");
  given(blocks[3]);
  check(hints(100 * kMiB) == 16 * kMiB, "what is freed takes none");
  for (const Hint& hint : fake.hints)
    check(hint.device == 0 && hint.at != reinterpret_cast<uintptr_t>(other.at), "nor another's");
  for (int i : {0, 1, 2, 4}) given(blocks[static_cast<size_t>(i)]);
  given(other);
  fake.log.clear();
  check(hints(100 * kMiB) == 0 && fake.log.empty(), "without blocks nothing is asked");
}

/// More blocks than one call gives hints for: the round continues in the next calls, then ends.
void test_a_round() {
  begin();
  std::vector<CudaBlock> blocks;
  for (int i = 0; i < 150; ++i) blocks.push_back(taken(kManaged, kMiB));
  fake.total = 0, fake.free = static_cast<size_t>(1000 * kMiB);
  fake.log.clear();
  for (int i = 0; i < 3; ++i) check(lowbit_cuda_prefetch(0, nullptr) == nullptr, "a call");
  check(fake.hints.size() == 150, "each block takes one hint in a round");
  check(std::count(fake.log.begin(), fake.log.end(), 'i') == 3, "a question in each call");
  wait_a_round();
  blocks.push_back(taken(kManaged, kMiB));
  check(lowbit_cuda_prefetch(0, nullptr) == nullptr && fake.hints.size() == 214,
        "another block begins a round at once");
  for (const CudaBlock& b : blocks) given(b);
}

/// For any blocks and any free memory: hints lie inside blocks, do not exceed the free memory, do
/// not repeat within a call, and cover every byte after some calls.
void test_any_blocks() {
  std::mt19937 random(1);
  for (int turn = 0; turn < 50; ++turn) {
    begin();
    std::vector<CudaBlock> blocks;
    const auto count = 1 + static_cast<int>(random() % 200);
    int64_t all = 0;
    for (int i = 0; i < count; ++i) {
      blocks.push_back(taken(kManaged, 65536 + static_cast<int64_t>(random() % 3000000)));
      all += blocks.back().bytes;
    }
    std::map<uintptr_t, std::vector<bool>> seen;  // pages of each block
    for (const CudaBlock& b : blocks)
      seen[reinterpret_cast<uintptr_t>(b.at)].resize(static_cast<size_t>(b.bytes + 65535) / 65536);
    bool inside = true, few = true, once = true;
    int64_t hinted = 0;
    for (int call = 0; call < 400; ++call) {
      fake.hints.clear(), fake.log.clear();
      fake.total = 0, fake.free = 65536 + random() % static_cast<size_t>(all);
      bool taken = true;
      for (int i = 0; i < lowbit::cuda::kCalls && fake.log.empty(); ++i)
        taken &= lowbit_cuda_prefetch(0, nullptr) == nullptr;
      check(taken && !fake.log.empty(), "hints are taken, sooner or later");
      std::map<uintptr_t, int64_t> now;
      int64_t bytes = 0;
      for (const Hint& hint : fake.hints) {
        const auto block = std::prev(seen.upper_bound(hint.at));
        const auto of = fake.here.at(block->first);
        inside &= hint.at + static_cast<uintptr_t>(hint.bytes) <= block->first + of;
        for (uintptr_t page = (hint.at - block->first) / 65536;
             page * 65536 < hint.at - block->first + static_cast<uintptr_t>(hint.bytes); ++page)
          block->second[page] = true;
        const auto after = now.upper_bound(hint.at);
        once &=
            after == now.begin() ||
            std::prev(after)->first + static_cast<uintptr_t>(std::prev(after)->second) <= hint.at;
        once &= after == now.end() || hint.at + static_cast<uintptr_t>(hint.bytes) <= after->first;
        now[hint.at] = hint.bytes;
        bytes += hint.bytes;
      }
      few &= bytes <= static_cast<int64_t>(fake.free) && fake.hints.size() <= 64;
      hinted += bytes;
    }
    bool every = true;
    for (const auto& block : seen) {
      for (const bool page : block.second) every &= page;
    }
    check(inside, "hints lie in blocks");
    check(few, "they come to no more than there is room for");
    check(once, "no byte takes two in a call");
    check(every && hinted > 0, "every byte takes one in some calls");
    for (const CudaBlock& b : blocks) given(b);
  }
}

/// A sentence says what to do where the driver or the build does not fit the GPU.
void test_sentences() {
  using lowbit::cuda::explain;
  check(explain(cudaSuccess, "x") == nullptr, "success needs no sentence");
  const std::pair<cudaError_t, const char*> hints[] = {
      {cudaErrorNoKernelImageForDevice, "build again with it in LOWBIT_CUDA_ARCHS"},
      {cudaErrorInvalidDeviceFunction, "below 8.0, which has no kernels, keep its parameters"},
      {cudaErrorUnsupportedPtxVersion, "lowbit's PTX, which is newer than its driver"},
      {cudaErrorInsufficientDriver, "update it, or build with an older toolkit"}};
  for (const auto& [error, hint] : hints) {
    const std::string text = explain(error, "loading kernels");
    check(text.find(" while loading kernels; ") != std::string::npos, "what was being done");
    check(text.find(hint) != std::string::npos, "what to do");
  }
}

}  // namespace

int main() {
  test_blocks();
  test_sentences();
  test_refusals();
  test_hints();
  test_a_round();
  test_any_blocks();
  return finish();
}
