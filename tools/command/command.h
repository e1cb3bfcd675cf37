// The subcommands of lowbit-ckpt, one file each.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// Adds a subcommand to `app`. If the user chose it, `chosen` gets its action.
using AddCommand = void (*)(CLI::App& app, std::function<Status()>& chosen);

void add_inspect(CLI::App& app, std::function<Status()>& chosen);
void add_convert(CLI::App& app, std::function<Status()>& chosen);
void add_reshard(CLI::App& app, std::function<Status()>& chosen);
void add_verify(CLI::App& app, std::function<Status()>& chosen);
void add_diff(CLI::App& app, std::function<Status()>& chosen);
void add_completion(CLI::App& app, std::function<Status()>& chosen);
void add_man(CLI::App& app, std::function<Status()>& chosen);

}  // namespace lowbit::ckpt
