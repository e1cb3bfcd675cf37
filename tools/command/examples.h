// One line for each thing that people come for. They stand in --help and in the man page; a test
// runs every one of them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lowbit::ckpt {

struct Example {
  const char* command;
  const char* about;
  const char* line;  // behind the program's name
  bool common;       // shown by the program's own --help
};

/// Those that this program can do: its commands, and options that they have.
std::vector<Example> examples(const CLI::App& app);
/// As they stand in a help, for one command, or the common ones where `command` is empty.
std::string examples_text(const CLI::App& app, const std::string& command);

}  // namespace lowbit::ckpt
