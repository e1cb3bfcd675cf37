#include "command/outline.h"

#include <algorithm>

#include "container/manifest.h"
#include "dialect/dialect.h"
#include "dialect/presets.h"

namespace lowbit::ckpt {
namespace {

/// CLI11 tells what an option takes as one text: a type, then the checks, such as
/// "TEXT:{dcp,torch}", "INT:INT in [1 - 256]".
void split_type(const std::string& text, OutlineOption& to) {
  const size_t colon = text.find(':');
  to.value = text.substr(0, colon);
  if (colon == std::string::npos) return;
  const size_t open = text.find('{', colon), close = text.find('}', colon);
  if (open == std::string::npos || close == std::string::npos) return;
  for (size_t at = open + 1; at < close;) {
    const size_t comma = std::min(text.find(',', at), close);
    to.choices.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
}

/// Values that the program knows, though the parser does not.
void add_known(OutlineOption& to) {
  if (to.value == "DIALECT") {
    for (const Dialect* d : dialects()) to.choices.emplace_back(d->name);
  } else if (to.value == "KIND") {
    for (const ContainerKind kind :
         {ContainerKind::kDcp, ContainerKind::kTorch, ContainerKind::kSafetensors})
      to.choices.emplace_back(container_name(kind));
  } else if (to.names.back() == "--state-format") {
    to.choices = preset_names();
    to.open = true;
  }
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

}  // namespace lowbit::ckpt
