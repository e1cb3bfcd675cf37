// lowbit-ckpt: checkpoints of PyTorch optimizers, without torch, without Python, and without
// executing anything that is in them.
#include <fmt/core.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "command/command.h"
#include "command/errors.h"
#include "command/examples.h"
#include "command/signals.h"
#include "command/suggest.h"
#include "command/version.h"
#include "io/text.h"

namespace {

/// "...; lowbit-ckpt inspect --help has the options".
std::string help_for(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? "; lowbit-ckpt --help has the commands, with examples"
                        : fmt::format("; lowbit-ckpt {} --help has the options and examples",
                                      chosen.front()->get_name());
}

/// What was printed, handed to whoever reads it: a full disk shows only here.
lowbit::ckpt::Status flush_output() {
  if (std::cout.flush() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0)
    return lowbit::ckpt::fine();
  return lowbit::ckpt::failed(std::string("cannot write the output: ") + std::strerror(errno));
}

/// The exit code, and the line on standard error where something went wrong.
int ended(const lowbit::ckpt::Status& done) {
  if (done.ok()) return 0;
  lowbit::ckpt::print_error(fmt::format("lowbit-ckpt: {}\n", done.error().text));
  return static_cast<int>(done.error().code);
}

/// What to say where the first argument is not a command; empty where it is one, or there is none.
std::string unknown_command(const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining();
  if (!app.get_subcommands().empty() || rest.empty() || rest.front().starts_with('-')) return "";
  std::string names;
  std::vector<std::string> all;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App* c) {
         return !c->get_group().empty();  // `man` is for those who package it
       })) {
    names += (names.empty() ? "" : ", ") + command->get_name();
    all.push_back(command->get_name());
  }
  if (rest.front() == "help")
    return "there is no command help; lowbit-ckpt --help has the commands";
  const std::string meant = lowbit::ckpt::nearest_word(rest.front(), all);
  return fmt::format("there is no command {}; there are {}{}",
                     lowbit::ckpt::printable(rest.front()), names,
                     meant.empty() ? "" : "; did you mean " + meant + "?");
}

/// "; did you mean --world-size?" where an argument resembles an option of the command.
std::string meant_option(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  const CLI::App& command = chosen.empty() ? app : *chosen.front();
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const std::string& word : command.remaining()) {
    if (!word.starts_with("--")) continue;
    const std::string name = word.substr(0, word.find('='));
    if (const std::string meant = lowbit::ckpt::nearest_word(name, known); !meant.empty())
      return "; did you mean " + meant + "?";
  }
  return "";
}

/// What CLI11 says, but of an option that is given twice.
std::string said_of(const CLI::Error& error) {
  const std::string text = error.what();
  const size_t twice = text.find(": At Most 1 required but received ");
  return twice == std::string::npos ? text : text.substr(0, twice) + " is given more than once";
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lowbit::ckpt;
  CLI::App app(
      "Inspect, verify, convert, reshard and compare checkpoints of PyTorch optimizers. No file is "
      "ever executed.",
      "lowbit-ckpt");
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  std::function<Status()> chosen;
  for (const AddCommand add :
       {add_inspect, add_verify, add_convert, add_reshard, add_diff, add_completion, add_man})
    add(app, chosen);
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; }))
    command->footer(examples_text(app, command->get_name()));
  app.footer(
      examples_text(app, "") +
      "\nlowbit-ckpt COMMAND --help has the options and more examples.\n"
      "Exit codes: 0 success, 1 I/O error, 2 usage error, 3 bad or unsafe input, 4 mismatch.");
  app.failure_message([&app](const CLI::App*, const CLI::Error& error) {
    const std::string known = unknown_command(app);
    return fmt::format("lowbit-ckpt: {}\n",
                       known.empty() ? said_of(error) + meant_option(app) + help_for(app) : known);
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? ended(flush_output()) : static_cast<int>(Exit::kUsage);
  }
  watch_signals();
  try {
    const Status done = chosen();
    return ended(done.ok() ? flush_output() : done);
  } catch (const std::bad_alloc&) {
    print_error("lowbit-ckpt: not enough memory\n");
  } catch (const std::exception& error) {
    print_error(fmt::format("lowbit-ckpt: {}\n", error.what()));
  }
  return static_cast<int>(Exit::kRuntime);
}
