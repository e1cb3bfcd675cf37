// The registry of state formats, update rules, parameter formats and gradient formats. The position
// of a type in its list is its index.
#pragma once

#include "core/grad.h"
#include "core/param/bfloat16.h"
#include "core/param/float16.h"
#include "core/param/float32.h"
#include "core/param/kahan.h"
#include "core/param/split.h"
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
#include "core/update/adafactor.h"
#include "core/update/adagrad.h"
#include "core/update/adam.h"
#include "core/update/adam_factored.h"
#include "core/update/ademamix.h"
#include "core/update/apollo.h"
#include "core/update/came.h"
#include "core/update/cautious.h"
#include "core/update/lion.h"
#include "core/update/muon.h"
#include "core/update/rmsprop.h"
#include "core/update/schedule_free.h"
#include "core/update/sgd.h"
#include "core/update/trust.h"

namespace lowbit {

template <class... T>
struct Types {
  static constexpr int kCount = sizeof...(T);
};

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
using UpdateRules =
    Types<AdamW, Adam, AdamWAmsgrad, AdamAmsgrad, AdamWFactored, AdamFactored, Adafactor,
          AdafactorFull, AdafactorMomentum, AdafactorFullMomentum, Came, CameFull, Lamb, Lars, Sgd,
          SgdMomentum, Lion, Rmsprop, RmspropMomentum, RmspropCentered, RmspropCenteredMomentum,
          Adagrad, Ademamix, ApolloInner, MuonMomentum, Muon, ScheduleFreeAdamW, Cautious<AdamW>,
          Cautious<Adam>, Cautious<AdamWAmsgrad>, Cautious<AdamAmsgrad>, Cautious<Lion>,
          Cautious<SgdMomentum>, ApolloAdafactor>;
using ParamFormats =
    Types<Float32Param, BFloat16Nearest, BFloat16Stochastic, Float16Nearest, Float16Stochastic,
          BFloat16Kahan, Float16Kahan, BFloat16Split8, BFloat16Split16, Float16Split8,
          Float16Split16, BFloat16Split8Stochastic>;
using GradFormats = Types<Float32Grad, BFloat16Grad, Float16Grad>;

}  // namespace lowbit
