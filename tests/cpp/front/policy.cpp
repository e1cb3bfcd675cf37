// What the C++ front end decides about a parameter: its stream of random bits, and the keys of its
// state under AdamW. tests/repo/test_policy.py compares it with Python and lowbit-ckpt.
//
//   policy NAME STATE_FORMAT SIZE...

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lowbit/param_state.h"

int main(int argc, char** argv) {
  std::vector<int64_t> shape;
  for (int i = 3; i < argc; ++i) shape.push_back(std::atoll(argv[i]));
  lowbit::StateOptions options;
  options.state_format = argv[2];
  const lowbit::ParamState state("adamw", shape, "float32", options);
  std::printf("%u", lowbit::stream_of(argv[1]));
  for (const lowbit::StateTensor& t : state.tensors()) std::printf(" %s", t.key.c_str());
  std::printf("\n");
}
