// libFuzzer's entry: build with clang and -DLOWBIT_FUZZ=ON, run `fuzz_ckpt CORPUS
// -max_total_time=60`.
#include "tools/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lowbit::ckpt::read_untrusted({reinterpret_cast<const char*>(data), size});
  return 0;
}
