// Compiled with -mavx2: nothing here may be a function that other sources have too.
#ifdef __AVX2__
#include "io/hash_xxh3.h"

namespace lowbit::ckpt {

const HashKernels kHashAvx2 = {"avx2", xxh3_reset, xxh3_add, xxh3_digest};

}  // namespace lowbit::ckpt
#endif
