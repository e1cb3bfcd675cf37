// lowbit-ckpt: checkpoints of PyTorch optimizers, without torch, without Python, and without
// executing anything that is in them.
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "command/command.h"
#include "command/errors.h"
#include "command/examples.h"
#include "command/signals.h"
#include "command/version.h"
#include "io/suggest.h"
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

/// The commands, without those that are for packagers.
std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command :
       app.get_subcommands([](const CLI::App* c) { return !c->get_group().empty(); }))
    names.push_back(command->get_name());
  return names;
}

/// What to say where the first argument is not a command; empty where it is one.
std::string unknown_command(const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining(), names = command_names(app);
  if (!app.get_subcommands().empty() || (!rest.empty() && rest.front().starts_with('-'))) return "";
  if (rest.empty())
    return fmt::format("a command is required: {}{}", fmt::join(names, ", "), help_for(app));
  if (rest.front() == "help")
    return "there is no command help; lowbit-ckpt --help has the commands";
  return fmt::format("there is no command {}; there are {}{}",
                     lowbit::ckpt::printable(rest.front()), fmt::join(names, ", "),
                     lowbit::ckpt::did_you_mean(rest.front(), names));
}

/// What to say of arguments that the command, or the program before it, does not take.
std::string unknown_argument(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  const bool before = chosen.empty() || chosen.front()->remaining().empty();
  const CLI::App& command = before ? app : *chosen.front();
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::vector<std::string> rest = command.remaining();
  for (const std::string& word : rest) {
    if (!word.starts_with('-')) continue;
    const std::string name = word.substr(0, word.find('='));
    return fmt::format("{} no option {}{}", before ? "there is" : command.get_name() + " has",
                       lowbit::ckpt::printable(name), lowbit::ckpt::did_you_mean(name, known));
  }
  return fmt::format("{} has no place for '{}'", command.get_name(),
                     rest.empty() ? "" : lowbit::ckpt::printable(rest.front()));
}

/// What CLI11 says, but of unknown arguments, and of an option that is given twice or without its
/// value.
std::string said_of(const CLI::App& app, const CLI::Error& error) {
  const std::string text = error.what();
  const bool no_command = app.get_subcommands().empty() && !app.remaining().empty();
  if (no_command || error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError))
    return unknown_argument(app);
  if (const size_t twice = text.find(": At Most 1 required but received ");
      twice != std::string::npos)
    return text.substr(0, twice) + " is given more than once";
  const size_t without = text.find(": 1 required "), end = text.rfind(" missing");
  if (without == std::string::npos || end == std::string::npos) return text;
  const size_t type = without + std::strlen(": 1 required ");
  return text.substr(0, without) + " lacks its " + text.substr(type, end - type);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lowbit::ckpt;
  CLI::App app(
      "Inspect, verify, convert, reshard and compare checkpoints of PyTorch optimizers. No file is "
      "ever executed.",
      "lowbit-ckpt");
  app.set_version_flag("--version", version_text(), "Print the version and exit");
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.get_formatter()->label("Positionals", "Arguments");
  app.require_subcommand(1);
  std::function<Status()> chosen;
  for (const AddCommand add :
       {add_inspect, add_verify, add_convert, add_reshard, add_diff, add_completion, add_man})
    add(app, chosen);
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    command->footer(examples_text(app, command->get_name()));
    if (!command->get_group().empty()) command->group("Commands");
  }
  app.footer(
      examples_text(app, "") +
      "\nlowbit-ckpt COMMAND --help has the options and more examples.\n"
      "Exit codes: 0 success, 1 I/O error, 2 usage error, 3 bad or unsafe input, 4 mismatch.");
  app.failure_message([&app](const CLI::App*, const CLI::Error& error) {
    const std::string known = unknown_command(app);
    return fmt::format("lowbit-ckpt: {}\n",
                       known.empty() ? said_of(app, error) + help_for(app) : known);
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
