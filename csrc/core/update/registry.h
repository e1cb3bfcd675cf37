// The registry of update rules. The position of a type in the list is its index.
#pragma once

#include "core/types.h"
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

using UpdateRules =
    Types<AdamW, Adam, AdamWAmsgrad, AdamAmsgrad, AdamWFactored, AdamFactored, Adafactor,
          AdafactorFull, AdafactorMomentum, AdafactorFullMomentum, Came, CameFull, Lamb, Lars, Sgd,
          SgdMomentum, Lion, Rmsprop, RmspropMomentum, RmspropCentered, RmspropCenteredMomentum,
          Adagrad, Ademamix, ApolloInner, MuonMomentum, Muon, ScheduleFreeAdamW, Cautious<AdamW>,
          Cautious<Adam>, Cautious<AdamWAmsgrad>, Cautious<AdamAmsgrad>, Cautious<Lion>,
          Cautious<SgdMomentum>, ApolloAdafactor>;

}  // namespace lowbit
