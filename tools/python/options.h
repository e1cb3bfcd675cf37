// The options of commands, as lowbit/checkpoint/commands.py writes them: one flat JSON object each.
#pragma once

#include <string>

#include "pipeline/commands.h"

namespace lowbit::ckpt::python {

/// The options of inspect, verify, convert, reshard or diff. What is not said keeps its default. A
/// key that a command does not have, and a value of another type, raise TypeError.
template <class Options>
Options options_of(const std::string& json);

}  // namespace lowbit::ckpt::python
