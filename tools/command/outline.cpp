#include "command/outline.h"

#include <sstream>

#include "dialect/model/presets.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

/// CLI11 tells what an option takes as one text: a type, then the checks, such as
/// "TEXT:{dcp,torch}", "N".
void split_type(const std::string& text, OutlineOption& to) {
  to.value = text.substr(0, text.find(':'));
  const size_t open = text.find('{'), close = text.find('}');
  if (open == std::string::npos || close == std::string::npos) return;
  std::istringstream choices(text.substr(open + 1, close - open - 1));
  for (std::string choice; std::getline(choices, choice, ',');) to.choices.push_back(choice);
}

/// Values that the program knows, though the parser does not.
void add_known(OutlineOption& to) {
  const std::string& name = to.names.back();
  if (to.value == "DIALECT")
    to.choices = name == "--to" ? written_dialect_names() : dialect_names();
  if (to.value == "KIND") to.choices = container_names();
  to.open = name == "--state-format";
  if (to.open) to.choices = preset_names();
}

OutlineOption outline(const CLI::Option& option) {
  OutlineOption out;
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  if (option.get_positional()) out.names = {option.get_name()};
  out.about = option.get_description();
  if (option.get_expected_max() > 0) {
    split_type(option.get_type_name(), out);
    if (out.value.empty()) out.value = "VALUE";
    if (out.choices.empty()) add_known(out);
  }
  out.required = option.get_required();
  out.many = option.get_expected_max() > 1;
  return out;
}

}  // namespace

bool OutlineOption::is_path() const {
  return choices.empty() &&
         (value == "TEXT" || value == "FILE" || value == "PATH" || value == "DIR");
}

Outline outline(const CLI::App& app) {
  Outline out;
  out.name = app.get_name();
  out.about = app.get_description();
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    (option->get_positional() ? out.places : out.options).push_back(outline(*option));
  }
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) out.commands.push_back(outline(*command));
  }
  return out;
}

std::string escaped(const std::string& text, const std::map<char, const char*>& by) {
  std::string out;
  for (const char c : text) {
    const auto other = by.find(c);
    out += other == by.end() ? std::string(1, c) : other->second;
  }
  return out;
}

}  // namespace lowbit::ckpt
