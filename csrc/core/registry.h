// The registries of state formats, update rules, parameter formats and gradient formats.
#pragma once

#include "core/grad.h"
#include "core/param/registry.h"
#include "core/state/registry.h"
#include "core/update/registry.h"
