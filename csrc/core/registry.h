// The one place where a state format, update rule, parameter format or gradient type is registered.
// Its position in the list is its index.
#pragma once

#include "core/grad.h"
#include "core/param/bfloat16.h"
#include "core/param/float16.h"
#include "core/param/float32.h"
#include "core/param/kahan.h"
#include "core/param/split.h"
#include "core/state/bfloat16.h"
#include "core/state/dynamic8.h"
#include "core/state/float32.h"
#include "core/update/adam.h"

namespace lowbit {

template <class... T>
struct Types {
  static constexpr int kCount = sizeof...(T);
};

using StateFormats = Types<Float32State, BFloat16State, Dynamic8, Dynamic8Unsigned>;
using UpdateRules = Types<AdamW, Adam, AdamWAmsgrad, AdamAmsgrad>;
using ParamFormats = Types<Float32Param, BFloat16Nearest, BFloat16Stochastic, Float16Nearest,
                           Float16Stochastic, BFloat16Kahan, Float16Kahan, BFloat16Split8,
                           BFloat16Split16, Float16Split8, Float16Split16>;
using GradFormats = Types<Float32Grad, BFloat16Grad, Float16Grad>;

}  // namespace lowbit
