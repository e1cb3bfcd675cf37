// `lowbit-ckpt completion SHELL`: what makes a shell complete commands and options.
#include <fmt/format.h>

#include <algorithm>

#include "command/command.h"
#include "command/outline.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

std::string joined(const std::vector<std::string>& words, const std::string& between = " ") {
  return fmt::format("{}", fmt::join(words, between));
}

std::string option_names(const Outline& of) {
  std::vector<std::string> out;
  for (const OutlineOption& o : of.options) out.insert(out.end(), o.names.begin(), o.names.end());
  return joined(out);
}

bool takes_files(const Outline& command) {
  return std::ranges::any_of(command.places,
                             [](const OutlineOption& place) { return place.is_path(); });
}

constexpr char kBash[] = R"(# bash completion for lowbit-ckpt
_lowbit_ckpt() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command='' options='' words='' files='' i
  # Where '=' divides words: --option=value.
  if [[ $current == = ]]; then
    current=''
  elif [[ $previous == = ]]; then
    previous="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ ${{COMP_WORDS[i]}} != -* ]]; then
      command="${{COMP_WORDS[i]}}"
      break
    fi
  done
  COMPREPLY=()
  case "$command:$previous" in
{}    *)
      case "$command" in
        '') options='{}' words='{}' ;;
{}      esac ;;
  esac
  if [[ $current == -* ]]; then
    words=$options files=''
  fi
  [[ -z $words ]] || mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  if [[ -n $files ]]; then
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$current")
  fi
}}
complete -F _lowbit_ckpt lowbit-ckpt
)";

std::string bash(const Outline& app) {
  std::string values, commands, names;
  for (const Outline& command : app.commands) {
    names += (names.empty() ? "" : " ") + command.name;
    const std::string key = command.name + ":";
    for (const OutlineOption& o : command.options) {
      if (o.value.empty()) continue;
      values += fmt::format("    {}{}) {} ;;\n", key, joined(o.names, "|" + key),
                            !o.choices.empty() ? "words='" + joined(o.choices) + "'"
                            : o.is_path()      ? "files=1"
                                               : "return");
    }
    std::vector<std::string> words;
    for (const OutlineOption& place : command.places)
      words.insert(words.end(), place.choices.begin(), place.choices.end());
    commands +=
        fmt::format("        {}) options='{}' words='{}'{} ;;\n", command.name,
                    option_names(command), joined(words), takes_files(command) ? " files=1" : "");
  }
  return fmt::format(kBash, values, option_names(app), names, commands);
}

constexpr char kZsh[] = R"(#compdef lowbit-ckpt
# zsh completion for lowbit-ckpt
_lowbit_ckpt() {{
  local context state state_descr line
  typeset -A opt_args
  _arguments -C{} \
    '1: :->command' '*:: :->rest'
  case $state in
    command)
      local -a commands
      commands=(
{}      )
      _describe command commands ;;
    rest)
      case $line[1] in
{}      esac ;;
  esac
}}
if [ "$funcstack[1]" = _lowbit_ckpt ]; then
  _lowbit_ckpt "$@"
else
  compdef _lowbit_ckpt lowbit-ckpt
fi
)";

/// In _arguments, brackets and colons of a description have a meaning.
std::string zsh_text(const std::string& text) {
  return escaped(text, {{'[', "\\["}, {']', "\\]"}, {':', "\\:"}, {'\\', "\\\\"}, {'\'', "'\\''"}});
}

std::string zsh_value(const OutlineOption& o) {
  if (o.value.empty()) return "";
  return fmt::format(":{}:{}", o.value,
                     !o.choices.empty() ? "(" + joined(o.choices) + ")"
                     : o.is_path()      ? "_files"
                                        : " ");
}

std::string zsh_options(const Outline& of, const char* indent) {
  std::string out;
  for (const OutlineOption& o : of.options) {
    for (const std::string& name : o.names) {
      out += fmt::format(" \\\n{}'{}{}{}[{}]{}'", indent, o.many ? "*" : "", name,
                         o.value.empty() ? "" : (name.starts_with("--") ? "=" : "+"),
                         zsh_text(o.about), zsh_value(o));
    }
  }
  return out;
}

std::string zsh(const Outline& app) {
  std::string names, commands;
  for (const Outline& command : app.commands) {
    names += fmt::format("        '{}:{}'\n", command.name, zsh_text(command.about));
    commands +=
        fmt::format("        {}) _arguments{}", command.name, zsh_options(command, "          "));
    for (size_t i = 0; i < command.places.size(); ++i)
      commands += fmt::format(" \\\n          '{}{}'", i + 1, zsh_value(command.places[i]));
    commands += " ;;\n";
  }
  return fmt::format(kZsh, zsh_options(app, "    "), names, commands);
}

std::string fish_text(const std::string& text) {
  return escaped(text, {{'\'', "\\'"}, {'\\', "\\\\"}});
}

std::string fish_options(const Outline& of, const std::string& where) {
  std::string out;
  for (const OutlineOption& o : of.options) {
    out += fmt::format("complete -c lowbit-ckpt -n '{}'", where);
    for (const std::string& name : o.names)
      out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (!o.value.empty()) out += o.is_path() ? " -r -F" : " -x";
    if (!o.choices.empty()) out += fmt::format(" -a '{}'", joined(o.choices));
    out += fmt::format(" -d '{}'\n", fish_text(o.about));
  }
  return out;
}

std::string fish(const Outline& app) {
  std::string out = "# fish completion for lowbit-ckpt\ncomplete -c lowbit-ckpt -f\n";
  out += fish_options(app, "__fish_use_subcommand");
  for (const Outline& command : app.commands) {
    const std::string where = "__fish_seen_subcommand_from " + command.name;
    out += fmt::format("complete -c lowbit-ckpt -n __fish_use_subcommand -a {} -d '{}'\n",
                       command.name, fish_text(command.about));
    out += fish_options(command, where);
    for (const OutlineOption& place : command.places) {
      if (!place.choices.empty())
        out +=
            fmt::format("complete -c lowbit-ckpt -n '{}' -a '{}'\n", where, joined(place.choices));
    }
    if (takes_files(command)) out += fmt::format("complete -c lowbit-ckpt -n '{}' -F\n", where);
  }
  return out;
}

}  // namespace

void add_completion(CLI::App& app, std::function<Status()>& chosen) {
  const auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print completions for a shell");
  command->add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->option_text("REQUIRED")
      ->check(CLI::Validator(
          [](const std::string& text) {
            const bool known = text == "bash" || text == "zsh" || text == "fish";
            return known ? "" : "takes bash, zsh or fish, not '" + printable(text) + "'";
          },
          "{bash,zsh,fish}"));  // outline.h reads the choices from here
  command->callback([shell, &app, &chosen] {
    chosen = [shell, &app] {
      const Outline all = outline(app);
      fmt::print("{}", *shell == "bash" ? bash(all) : *shell == "zsh" ? zsh(all) : fish(all));
      return fine();
    };
  });
}

}  // namespace lowbit::ckpt
