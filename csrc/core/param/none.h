// What a parameter format keeps beside the parameter where it keeps nothing.
#pragma once

namespace lowbit {

struct None {};

}  // namespace lowbit
