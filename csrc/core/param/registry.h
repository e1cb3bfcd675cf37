// The registry of parameter formats. The position of a type in the list is its index.
#pragma once

#include "core/param/bfloat16.h"
#include "core/param/float16.h"
#include "core/param/float32.h"
#include "core/param/kahan.h"
#include "core/param/split.h"
#include "core/types.h"

namespace lowbit {

using ParamFormats =
    Types<Float32Param, BFloat16Nearest, BFloat16Stochastic, Float16Nearest, Float16Stochastic,
          BFloat16Kahan, Float16Kahan, BFloat16Split8, BFloat16Split16, Float16Split8,
          Float16Split16, BFloat16Split8Stochastic>;

}  // namespace lowbit
