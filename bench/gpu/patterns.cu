// In which order a GPU's memory answers fastest: `make gpu PARTS=profile`, or
//
//     nvcc -std=c++17 -O3 -arch=sm_90 -o patterns bench/gpu/patterns.cu && ./patterns
//
// Bulk copies need compute capability 9.0 or later.
//
// A step of AdamW with 8-bit state reads gradients, and reads and writes parameters, two states and
// their scales. Here a kernel moves the same bytes, with as much arithmetic and as many look-ups,
// or none, and everything else varies:
//
//     order    which tiles of 256 values a warp takes: units of 8, 2 or 1 that lie together, every
//              eighth of a longer unit (block 8, block 2), or every n-th of all (grid)
//     loads    as they are needed; with the next tile on its way to the second cache; one tile
//              ahead by cp.async or in registers; or runs of tiles by bulk copies, one run ahead,
//              whose results are stored as they are computed or by bulk copies too
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

enum Loads { kNeeded, kPrefetched, kAsync, kRegisters };
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

/// The state after a tile's update. kWork rounds of arithmetic: 14 are about what a step executes.
template <int kWork>
__device__ __forceinline__ Values update(const Values& in, const float* table) {
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
  return {in.grad,
          make_uint4(x[4], x[5], x[6], x[7]),
          make_uint2(y[0], y[1]),
          make_uint2(y[2], y[3]),
          static_cast<float>(most_m),
          static_cast<float>(most_v)};
}
template <Scales kScales>
__device__ __forceinline__ void store(const Step& s, const Values& out, uint32_t tile, int lane) {
  const uint32_t at = tile * kLanes + lane;
  __stcg(s.param + at, out.param);
  __stcg(s.m + at, out.m);
  __stcg(s.v + at, out.v);
  if (kScales == kBoth && lane == 0) s.m_scale[tile] = out.m_scale, s.v_scale[tile] = out.v_scale;
}
__device__ __forceinline__ void to_cache(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}
/// Asks for a tile in the second cache: each range by one lane.
__device__ __forceinline__ void prefetch(const Step& s, uint32_t tile, int lane) {
  const uint32_t at = tile * kLanes;
  if (lane == 0) to_cache(s.grad + at, kLanes * sizeof(uint4));
  if (lane == 1) to_cache(s.param + at, kLanes * sizeof(uint4));
  if (lane == 2) to_cache(s.m + at, kLanes * sizeof(uint2));
  if (lane == 3) to_cache(s.v + at, kLanes * sizeof(uint2));
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
    if ((kLoads == kNeeded || kLoads == kPrefetched) && tile < s.tiles)
      now = load<kScales>(s, tile, lane);
    if (kLoads == kAsync) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      now = {coming.grad[lane], coming.param[lane],   coming.m[lane],
             coming.v[lane],    coming.m_scale[lane], coming.v_scale[lane]};
      __syncwarp();
      if (more) ask<kScales>(s, coming, next, lane);
    }
    if (kLoads == kRegisters && more) ahead = load<kScales>(s, next, lane);
    if (kLoads == kPrefetched && more) prefetch(s, next, lane);
    if (tile < s.tiles) store<kScales>(s, update<kWork>(now, table), tile, lane);
  }
}

/// Runs of kRun tiles by bulk copies: two stages of a warp, each with a barrier that counts its
/// bytes.
template <int kRun>
struct Runs {
  uint4 grad[kRun * kLanes], param[kRun * kLanes];
  uint2 m[kRun * kLanes], v[kRun * kLanes];
};
__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
template <int kRun>
__device__ __forceinline__ void ask_run(const Step& s, Runs<kRun>& run, uint32_t k,
                                        uint32_t barrier) {
  const uint32_t at = k * kRun * kLanes;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(static_cast<uint32_t>(sizeof(run)))
               : "memory");
  bulk_load(run.grad, s.grad + at, sizeof(run.grad), barrier);
  bulk_load(run.param, s.param + at, sizeof(run.param), barrier);
  bulk_load(run.m, s.m + at, sizeof(run.m), barrier);
  bulk_load(run.v, s.v + at, sizeof(run.v), barrier);
}
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// The number of tiles is a multiple of kRun. kBack: results go back by bulk copies.
template <int kRun, int kWork, bool kBack, int kBlocks>
__global__ void __launch_bounds__(kWarps* kLanes, kBlocks) bulk(const Step s) {
  extern __shared__ uint4 memory[];
  __shared__ uint64_t barriers[kWarps][2];
  float* table = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < kTable; i += kWarps * kLanes) table[i] = 1.0f + i * 1e-3f;
  const int lane = threadIdx.x % kLanes, w = threadIdx.x / kLanes;
  Runs<kRun>* runs = reinterpret_cast<Runs<kRun>*>(table + kTable) + 2 * w;
  const uint32_t barrier = shared_address(&barriers[w][0]);  // of the first stage
  const uint32_t first = blockIdx.x * kWarps + w, each = gridDim.x * kWarps;
  const uint32_t count = s.tiles / kRun;
  if (lane == 0) {
    for (int i = 0; i < 2; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * i) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (lane == 0 && first < count) ask_run(s, runs[0], first, barrier);
  uint32_t stage = 0, parity = 0;
#pragma unroll 1
  for (uint32_t k = first; k < count; k += each) {
    if (lane == 0 && k + each < count) {
      if (kBack) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      ask_run(s, runs[stage ^ 1], k + each, barrier + 8 * (stage ^ 1));
    }
    wait_for(barrier + 8 * stage, parity);
    Runs<kRun>& run = runs[stage];
#pragma unroll 1
    for (int i = 0; i < kRun; ++i) {
      const int at = i * kLanes + lane;
      const uint32_t tile = k * kRun + i;
      const Values out = update<kWork>(
          {run.grad[at], run.param[at], run.m[at], run.v[at], s.m_scale[tile], s.v_scale[tile]},
          table);
      if (!kBack) {
        store<kBoth>(s, out, tile, lane);
        continue;
      }
      run.param[at] = out.param, run.m[at] = out.m, run.v[at] = out.v;
      if (lane == 0) s.m_scale[tile] = out.m_scale, s.v_scale[tile] = out.v_scale;
    }
    if (kBack) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (kBack && lane == 0) {
      const uint32_t at = k * kRun * kLanes;
      bulk_store(s.param + at, run.param, sizeof(run.param));
      bulk_store(s.m + at, run.m, sizeof(run.m));
      bulk_store(s.v + at, run.v, sizeof(run.v));
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    parity ^= stage;
    stage ^= 1;
  }
  if (kBack && lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
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

float copied = 0;                     // milliseconds of a copy of a step's bytes
int processors = 0, most_shared = 0;  // most_shared: bytes of a block

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

template <int kRun, int kWork, bool kBack, int kBlocks>
void run_bulk(const Step& s) {
  const auto kernel = bulk<kRun, kWork, kBack, kBlocks>;
  const int shared = kTable * sizeof(float) + 2 * kWarps * sizeof(Runs<kRun>);
  if (shared > most_shared) {
    std::printf("bulk copies of %d tiles: no room on this card\n", kRun);
    return;
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "shared memory");
  int fit = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, kWarps * kLanes, shared),
        "occupancy");
  const int grid = processors * fit;
  const float ms = timed([&] {
    kernel<<<grid, kWarps * kLanes, shared>>>(s);
    check(cudaGetLastError(), "a launch");
  });
  std::printf("%s, bulk copies of %d tiles, %s: %d blocks | %.3f, %.0f %%\n",
              kWork ? "work" : "no work", kRun, kBack ? "and back" : "stores as computed", fit, ms,
              100 * copied / ms);
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
  check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
        "the device");
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
  run<kPrefetched, 0, kBoth, 3>(s, "no work, prefetched");
  run<kAsync, 0, kBoth, 3>(s, "no work, cp.async ahead");
  run<kNeeded, 14, kBoth, 3>(s, "work");
  run<kPrefetched, 14, kBoth, 3>(s, "work, prefetched");
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
  run_bulk<1, 14, false, 3>(s);
  run_bulk<2, 14, false, 3>(s);
  run_bulk<4, 14, false, 2>(s);
  run_bulk<1, 14, true, 3>(s);
  run_bulk<2, 14, true, 3>(s);
  run_bulk<4, 14, true, 2>(s);
  run_bulk<2, 0, false, 3>(s);
  run_bulk<2, 0, true, 3>(s);
  return 0;
}
