// The registry of state formats. The position of a type in the list is its index.
#pragma once

#include "core/state/bfloat16.h"
#include "core/state/companded8.h"
#include "core/state/dynamic.h"
#include "core/state/dynamic8.h"
#include "core/state/float32.h"
#include "core/state/float8.h"
#include "core/state/linear.h"
#include "core/state/log8.h"
#include "core/state/power.h"
#include "core/state/uniform.h"
#include "core/types.h"

namespace lowbit {

using StateFormats =
    Types<Float32State, BFloat16State, Dynamic8, Dynamic8Unsigned, Dynamic2, Dynamic2Unsigned,
          Dynamic3, Dynamic3Unsigned, Dynamic4, Dynamic4Unsigned, Dynamic5, Dynamic5Unsigned,
          Dynamic6, Dynamic6Unsigned, Dynamic7, Dynamic7Unsigned, Linear2, Linear2Unsigned, Linear3,
          Linear3Unsigned, Linear4, Linear4Unsigned, Linear5, Linear5Unsigned, Linear6,
          Linear6Unsigned, Linear7, Linear7Unsigned, Linear8, Linear8Unsigned, PowerOne2,
          PowerOne2Unsigned, PowerOne3, PowerOne3Unsigned, PowerOne4, PowerOne4Unsigned, PowerOne5,
          PowerOne5Unsigned, PowerOne6, PowerOne6Unsigned, PowerOne7, PowerOne7Unsigned, PowerOne8,
          PowerOne8Unsigned, PowerTwo2, PowerTwo2Unsigned, PowerTwo3, PowerTwo3Unsigned, PowerTwo4,
          PowerTwo4Unsigned, PowerTwo5, PowerTwo5Unsigned, PowerTwo6, PowerTwo6Unsigned, PowerTwo7,
          PowerTwo7Unsigned, PowerTwo8, PowerTwo8Unsigned, Float8E4M3, Float8E4M3Unsigned,
          Float8E5M2, Float8E5M2Unsigned, Log8Fixed, Log8, Log16, Log8Signed, Companded8,
          Companded8Unsigned, Uniform8>;

}  // namespace lowbit
