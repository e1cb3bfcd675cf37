// The options of commands, as lowbit/checkpoint/commands.py writes them: one flat JSON object each.
#pragma once

#include <string>

#include "pipeline/commands.h"

namespace lowbit::ckpt::python {

// What is not said keeps its default. A key that a command does not have, and a value of another
// type, raise TypeError.
InspectOptions inspect_options(const std::string& json);
VerifyOptions verify_options(const std::string& json);
ConvertOptions convert_options(const std::string& json);
ReshardOptions reshard_options(const std::string& json);
DiffOptions diff_options(const std::string& json);

}  // namespace lowbit::ckpt::python
