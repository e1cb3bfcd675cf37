// The stand-ins of arithmetic.cuh, which the emulator runs, against the PTX that replaces them.
#include "cuda/cuda_emulator.h"

#include "simulator/probe.cu"

#include <algorithm>
#include <random>

namespace {

/// NaN has many encodings, and the root of -0 is none of a second moment: of no result is asked
/// which.
uint32_t settled(uint32_t word, int probe) {
  const auto half = [](uint32_t h) { return (h & 0x7fffu) > 0x7f80u ? 0x7fffu : h; };
  if (probe == 4) return half(word & 0xffffu) | half(word >> 16) << 16;
  if (probe > 4) return word;
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
  return word == 0x80000000u && probe == 0 ? 0 : word;
}

}  // namespace

int main() {
  using namespace lowbit;
  constexpr size_t kBlocks = 100, kPairs = kBlocks * cuda::kLanes;
  std::mt19937 random(3);
  std::vector<uint32_t> in, out(cuda::kProbes * kPairs), largest(kPairs);
  const uint32_t odd[] = {0,           0x80000000u, 1,           0x807fffffu,
                          0x00800000u, 0x7f7fffffu, 0x7f800000u, 0xff800000u,
                          0x7fc00000u, 0xffc12345u, 0x3f808000u, 0x3f818000u};
  for (const uint32_t a : odd) {
    for (const uint32_t b : odd) in.push_back(a), in.push_back(b);
  }
  while (in.size() < 2 * kPairs) in.push_back(static_cast<uint32_t>(random()));
  for (uint32_t& word : in) {  // arithmetic returns quiet NaNs
    if ((word & 0x7fffffffu) > 0x7f800000u) word |= 0x00400000u;
  }
  cuda::launch(cuda::probe, kBlocks, cuda::kLanes, nullptr, "probe", in.data(), out.data(),
               largest.data());
  int passed = 0, failed = 0;
  const auto same = [&](uint32_t got, uint32_t want, size_t i, int probe) {
    const bool good = settled(got, probe) == settled(want, probe);
    good ? ++passed : ++failed;
    if (!good && failed < 20)
      std::printf("FAILED probe %d of %08x %08x: %08x, not %08x\n", probe, in[2 * i], in[2 * i + 1],
                  got, want);
  };
  for (size_t i = 0; i < kPairs; ++i) {
    uint32_t want[cuda::kProbes], most = 0;
    cuda::probe_two(in[2 * i], in[2 * i + 1], want);
    const uint32_t magnitude = in[2 * i] & 0x7fffffffu;
    const bool invertible = magnitude >= 0x00800000u && magnitude <= 0x7e800000u;  // as promised
    const bool finite = magnitude < 0x7f800000u;
    for (int k = 0; k < cuda::kProbes; ++k)
      if ((k != 1 || invertible) && (k != 12 || finite))
        same(out[cuda::kProbes * i + static_cast<size_t>(k)], want[k], i, k);
    for (size_t lane = 0; lane < cuda::kLanes; ++lane)
      most = std::max(most, in[2 * (i / cuda::kLanes * cuda::kLanes + lane)]);
    same(largest[i], most, i, cuda::kProbes);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
