// What a parameter format keeps beside the parameter when it keeps nothing.
#pragma once

namespace lowbit {

struct None {};

}  // namespace lowbit
