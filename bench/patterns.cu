// In which order a GPU's memory answers fastest: `make gpu PARTS=profile`, or
//
//     nvcc -std=c++17 -O3 -arch=sm_90 -o patterns bench/patterns.cu && ./patterns
//
// A step of AdamW with 8-bit state reads gradients, and reads and writes parameters, two states and
// their scales. Here a kernel moves the same bytes, with as much arithmetic and as many look-ups,
// or none, and everything else varies:
//
//     order    which tiles of 256 values a warp takes: units of 8, 2 or 1 that lie together, every
//              eighth of a longer unit (block 8, block 2), or every n-th of all (grid)
//     loads    as they are needed, one tile ahead by cp.async, or one tile ahead in registers
//     scales   read and written, only read, or none
//     blocks   of 8 warps on a multiprocessor
//
// It prints milliseconds for 2^28 values, and the share of a copy's speed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

enum Loads { kNeeded, kAsync, kRegisters };
enum Scales { kNoScales, kBoth, kRead };
enum class Order { kUnit, kBlock, kGrid };

constexpr int kWarps = 8, kLanes = 32, kTable = 4096 + 2048;

struct Step {
  const uint4* grad;
  uint4* param;
  uint2 *m, *v;
  float *m_scale, *v_scale;
  uint32_t tiles;
};
struct Values {
  uint4 grad, param;
  uint2 m, v;
  float m_scale, v_scale;
};
/// A tile on its way to shared memory.
struct Coming {
  uint4 grad[kLanes], param[kLanes];
  uint2 m[kLanes], v[kLanes];
  float m_scale[kLanes], v_scale[kLanes];
};

template <class T>
__device__ __forceinline__ void copy_later(T* to, const T* from) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(T) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(sizeof(T))
                 : "memory");
  }
}

template <Scales kScales>
__device__ __forceinline__ Values load(const Step& s, uint32_t tile, int lane) {
  const uint32_t at = tile * kLanes + lane;
  Values x{__ldcg(s.grad + at), __ldcg(s.param + at), __ldcg(s.m + at), __ldcg(s.v + at), 1, 1};
  if (kScales != kNoScales) x.m_scale = s.m_scale[tile], x.v_scale = s.v_scale[tile];
  return x;
}
template <Scales kScales>
__device__ __forceinline__ void ask(const Step& s, Coming& c, uint32_t tile, int lane) {
  const uint32_t at = tile * kLanes + lane;
  copy_later(&c.grad[lane], s.grad + at);
  copy_later(&c.param[lane], s.param + at);
  copy_later(&c.m[lane], s.m + at);
  copy_later(&c.v[lane], s.v + at);
  if (kScales == kNoScales) return;
  copy_later(&c.m_scale[lane], s.m_scale + tile);
  copy_later(&c.v_scale[lane], s.v_scale + tile);
}

/// kWork rounds of arithmetic: 14 are about what a step executes.
template <int kWork, Scales kScales>
__device__ __forceinline__ void update(const Step& s, const Values& in, uint32_t tile, int lane,
                                       const float* table) {
  uint32_t x[8] = {in.grad.x,  in.grad.y,  in.grad.z,  in.grad.w,
                   in.param.x, in.param.y, in.param.z, in.param.w};
  uint32_t y[4] = {in.m.x, in.m.y, in.v.x, in.v.y};
  if constexpr (kWork > 0) {
    float z[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      z[i] = table[y[i / 4] >> (8 * (i % 4)) & 255] * (i < 8 ? in.m_scale : in.v_scale);
#pragma unroll
    for (int k = 0; k < kWork; ++k) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = __umulhi(x[i], 0xD2511F53u) ^ (x[i] * 0xD2511F53u) ^ __float_as_uint(z[i]);
        z[i] = fmaf(z[i], 0.99f, z[i + 8]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t hash = __float_as_uint(z[i & 7]) * 0x9E3779B9u + x[i & 7];
      y[i / 4] += __float_as_uint(table[256 + (hash >> 21)]);
    }
  } else {
    for (int i = 0; i < 4; ++i) ++y[i], x[i + 4] += x[i] + __float_as_uint(in.m_scale + in.v_scale);
  }
  const uint32_t most_m = __reduce_max_sync(~0u, x[4] & 0xffffu);
  const uint32_t most_v = __reduce_max_sync(~0u, y[1] & 0xffffu);
  const uint32_t at = tile * kLanes + lane;
  __stcg(s.param + at, make_uint4(x[4], x[5], x[6], x[7]));
  __stcg(s.m + at, make_uint2(y[0], y[1]));
  __stcg(s.v + at, make_uint2(y[2], y[3]));
  if (kScales == kBoth && lane == 0)
    s.m_scale[tile] = static_cast<float>(most_m), s.v_scale[tile] = static_cast<float>(most_v);
}

/// The i-th tile of a warp.
__device__ __forceinline__ uint32_t tile_at(Order order, uint32_t i, uint32_t unit_log,
                                            uint32_t warp, uint32_t warps) {
  if (order == Order::kGrid) return i * warps + warp;
  const uint32_t unit = (i >> unit_log) * warps + warp, k = i & ((1u << unit_log) - 1);
  if (order == Order::kUnit) return (unit << unit_log) + k;
  return (unit / kWarps << unit_log) * kWarps + warp % kWarps + kWarps * k;
}

template <Loads kLoads, int kWork, Scales kScales, int kBlocks>
__global__ void __launch_bounds__(kWarps* kLanes, kBlocks)
    step(const Step s, Order order, uint32_t unit_log, uint32_t each) {
  extern __shared__ uint4 memory[];
  float* table = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < kTable; i += kWarps * kLanes) table[i] = 1.0f + i * 1e-3f;
  __syncthreads();
  const int lane = threadIdx.x % kLanes;
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kLanes, warps = gridDim.x * kWarps;
  Coming& coming = reinterpret_cast<Coming*>(table + kTable)[threadIdx.x / kLanes];
  const auto nth = [&](uint32_t i) { return tile_at(order, i, unit_log, warp, warps); };
  uint32_t next = nth(0);
  Values ahead{};
  if (kLoads == kAsync && next < s.tiles) ask<kScales>(s, coming, next, lane);
  if (kLoads == kRegisters && next < s.tiles) ahead = load<kScales>(s, next, lane);
#pragma unroll 1
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t tile = next;
    next = nth(i + 1);
    const bool more = i + 1 < each && next < s.tiles;
    Values now = ahead;
    if (kLoads == kNeeded && tile < s.tiles) now = load<kScales>(s, tile, lane);
    if (kLoads == kAsync) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      now = {coming.grad[lane], coming.param[lane],   coming.m[lane],
             coming.v[lane],    coming.m_scale[lane], coming.v_scale[lane]};
      __syncwarp();
      if (more) ask<kScales>(s, coming, next, lane);
    }
    if (kLoads == kRegisters && more) ahead = load<kScales>(s, next, lane);
    if (tile < s.tiles) update<kWork, kScales>(s, now, tile, lane, table);
  }
}

__global__ void copy(const uint4* from, uint4* to, size_t n) {
  for (size_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull)
    to[i] = from[i];
}
__global__ void in_place(uint4* at, size_t n) {
  for (size_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) {
    uint4 x = at[i];
    x.x ^= 1;
    at[i] = x;
  }
}

/// The median of seven runs, in milliseconds.
template <class Run>
float timed(const Run& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "an event");
  check(cudaEventCreate(&end), "an event");
  run();
  std::vector<float> times;
  for (int i = 0; i < 7; ++i) {
    check(cudaEventRecord(begin), "beginning");
    run();
    check(cudaEventRecord(end), "ending");
    check(cudaEventSynchronize(end), "running");
    times.emplace_back();
    check(cudaEventElapsedTime(&times.back(), begin, end), "timing");
  }
  std::sort(times.begin(), times.end());
  return times[3];
}

float copied = 0;  // milliseconds of a copy of a step's bytes
int processors = 0;

template <Loads kLoads, int kWork, Scales kScales, int kBlocks>
void run(const Step& s, const char* what) {
  const auto kernel = step<kLoads, kWork, kScales, kBlocks>;
  const int shared = kTable * sizeof(float) + kWarps * sizeof(Coming);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "shared memory");
  int fit = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, kWarps * kLanes, shared),
        "occupancy");
  const int grid = processors * std::min(fit, kBlocks);
  std::printf("%-38s %d blocks", what, std::min(fit, kBlocks));
  const struct {
    Order order;
    uint32_t log;
    const char* name;
  } ways[] = {{Order::kUnit, 3, "unit 8"},   {Order::kUnit, 1, "unit 2"},
              {Order::kUnit, 0, "unit 1"},   {Order::kBlock, 3, "block 8"},
              {Order::kBlock, 1, "block 2"}, {Order::kGrid, 0, "grid"}};
  for (const auto& way : ways) {
    const uint32_t unit = 1u << way.log, round = grid * kWarps * unit;
    const uint32_t each = (s.tiles + round - 1) / round * unit;
    const float ms = timed([&] {
      kernel<<<grid, kWarps * kLanes, shared>>>(s, way.order, way.log, each);
      check(cudaGetLastError(), "a launch");
    });
    std::printf(" | %s %.3f, %.0f %%", way.name, ms, 100 * copied / ms);
  }
  std::printf("\n");
  std::fflush(stdout);
}

template <class T>
T* taken(size_t bytes) {
  void* at = nullptr;
  check(cudaMalloc(&at, bytes), "memory");
  return static_cast<T*>(at);
}

}  // namespace

int main() {
  constexpr size_t n = size_t{1} << 28, tiles = n / 256;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "the device");
  auto *grad = taken<uint4>(2 * n), *param = taken<uint4>(2 * n);
  const Step s{grad,
               param,
               taken<uint2>(n),
               taken<uint2>(n),
               taken<float>(4 * tiles),
               taken<float>(4 * tiles),
               tiles};
  std::vector<uint32_t> random(n / 2);
  uint32_t state = 1;
  for (uint32_t& x : random) state = state * 1664525u + 1013904223u, x = state ^ state >> 15;
  for (void* at : {static_cast<void*>(grad), static_cast<void*>(param)})
    check(cudaMemcpy(at, random.data(), 2 * n, cudaMemcpyHostToDevice), "filling");
  for (void* at : {static_cast<void*>(s.m), static_cast<void*>(s.v)})
    check(cudaMemcpy(at, random.data(), n, cudaMemcpyHostToDevice), "filling");
  check(cudaMemset(s.m_scale, 0, 4 * tiles), "filling");
  check(cudaMemset(s.v_scale, 0, 4 * tiles), "filling");

  constexpr size_t half = n / 2 * 161 / 256;  // 10.0625 bytes a value, half of them read
  auto *from = taken<uint4>(16 * half), *to = taken<uint4>(16 * half);
  copied = timed(
      [&] { check(cudaMemcpyAsync(to, from, 16 * half, cudaMemcpyDeviceToDevice), "copying"); });
  std::printf("a copy of a step's bytes: %.4f ms, %.0f GB/s\n", copied, 32e-6 * half / copied);
  for (const int grid : {processors * 4, processors * 16, 1 << 16}) {
    const float by_kernel = timed([&] { copy<<<grid, 256>>>(from, to, half); });
    const float changed = timed([&] { in_place<<<grid, 256>>>(from, half); });
    std::printf("%d blocks: copied %.4f ms, changed in place %.4f ms\n", grid, by_kernel, changed);
  }
  run<kNeeded, 0, kBoth, 3>(s, "no work");
  run<kNeeded, 0, kNoScales, 3>(s, "no work, no scales");
  run<kNeeded, 0, kRead, 3>(s, "no work, scales read");
  run<kNeeded, 0, kBoth, 6>(s, "no work, more warps");
  run<kAsync, 0, kBoth, 3>(s, "no work, cp.async ahead");
  run<kNeeded, 14, kBoth, 3>(s, "work");
  run<kNeeded, 14, kNoScales, 3>(s, "work, no scales");
  run<kNeeded, 14, kRead, 3>(s, "work, scales read");
  run<kNeeded, 14, kBoth, 4>(s, "work, more warps");
  run<kAsync, 14, kBoth, 3>(s, "work, cp.async ahead");
  run<kAsync, 14, kNoScales, 3>(s, "work, cp.async ahead, no scales");
  run<kRegisters, 14, kBoth, 3>(s, "work, registers ahead");
  run<kRegisters, 14, kNoScales, 3>(s, "work, registers ahead, no scales");
  run<kAsync, 14, kBoth, 2>(s, "work, cp.async ahead, fewer warps");
  run<kRegisters, 14, kBoth, 2>(s, "work, registers ahead, fewer warps");
  run<kNeeded, 7, kBoth, 3>(s, "half the work");
  return 0;
}
