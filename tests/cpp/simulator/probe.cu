// Every function of arithmetic.cuh that is an instruction of its own on a GPU, on words of all
// kinds.
#include "cuda/arithmetic.cuh"
#include "cuda/launch.h"

namespace lowbit::cuda {

constexpr int kProbes = 15;

/// The results for the words a and b.
__device__ __forceinline__ void probe_two(uint32_t a, uint32_t b, uint32_t* out) {
  const float x = bits_float(a), y = bits_float(b);
  out[0] = float_bits(sqrt_approx(x));
  out[1] = float_bits(reciprocal_approx(x));
  out[2] = float_bits(larger_magnitude(x, y));
  out[3] = float_bits(smaller_magnitude(x, y));
  out[4] = nearest_two(x, y);
  out[5] = byte_times_4(a, 0) | byte_times_4(a, 3) << 16;
  out[6] = byte_times_4(a, 1) | byte_times_4(a, 2) << 16;
  out[7] = upper_half_times_4(a);
  const uint32_t words[] = {a, b, a ^ b, a + b};
  out[8] = top_bytes(words);
  out[9] = sign_bytes(words);
  out[10] = upper_halves(a, b);
  out[11] = static_cast<uint32_t>(__ffs(static_cast<int>(a)));
  out[12] = float_bits(half_rounded(x));
  out[13] = floor_bits(static_cast<float>(static_cast<int32_t>(a)) * 0x1p-24f, 0x1.8p23f);
  out[14] = low_bytes(words);
}

/// Of each pair; then the largest first word of each warp.
__global__ void probe(const uint32_t* in, uint32_t* out, uint32_t* largest_of) {
  const uint32_t i = blockIdx.x * kLanes + threadIdx.x;
  probe_two(in[2 * i], in[2 * i + 1], out + kProbes * i);
  const uint32_t most = __reduce_max_sync(kAllLanes, in[2 * i]);
  largest_of[i] = most;
}

}  // namespace lowbit::cuda
