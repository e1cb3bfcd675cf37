// What the program's options are, read off the parser itself: completions and the man page are made
// from this, so they cannot tell of an option that is not there, or keep silent about one that is.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

namespace lowbit::ckpt {

struct OutlineOption {
  std::vector<std::string> names;    // with their dashes; of an argument by place, its one name
  std::string value;                 // what it takes: "N", "FILE", ...; empty: a switch
  std::vector<std::string> choices;  // values that are known
  bool open = false;                 // others are taken too
  std::string about;
  bool required = false, many = false;
  /// Whether its value may be the name of a file.
  bool is_path() const;
};

struct Outline {
  std::string name, about;
  std::vector<OutlineOption> options, places;
  std::vector<Outline> commands;  // without hidden ones
};

Outline outline(const CLI::App& app);

/// `text` with each of these characters replaced by what stands for it in the target's syntax.
std::string escaped(const std::string& text, const std::map<char, const char*>& by);

}  // namespace lowbit::ckpt
