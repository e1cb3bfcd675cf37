// The empty compensation type of parameter formats without compensation.
#pragma once

namespace lowbit {

struct None {};

}  // namespace lowbit
