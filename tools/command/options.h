// Options that several commands have, and how their values are written.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "pipeline/commands.h"

namespace lowbit::ckpt {

/// "512M", "2GiB", "65536": bytes. K, M, G and T count by 1024.
Result<uint64_t> parse_size(const std::string& text);
/// "4" or "2x2": ranks along each dimension of a mesh. `dims` is "0" or "0,1"; empty: 0, 1, ...
Result<Mesh> parse_mesh(const std::string& parts, const std::string& dims);
/// "1.5 GiB".
std::string size_text(uint64_t bytes);
/// "1 tensor", "2 tensors".
std::string counted(uint64_t count, const char* noun);
/// How many threads are used where nobody says: as many as the machine has, at most 8.
int default_threads();

/// A check that an option is a whole number within bounds.
CLI::Validator whole_number(int64_t least, int64_t most);

/// Adds an argument by its place, which must be there.
void add_place(CLI::App& command, const char* name, std::string& value, const char* about);
/// Makes an option take one value, and be repeated.
void repeat(CLI::Option* option, const char* type);
void add_selection(CLI::App& command, Selection& selection);
/// --model. `whose`: the checkpoints that may need it.
void add_model(CLI::App& command, const std::string& whose, std::string& model);

/// --part, --threads, --memory-limit and --force.
struct WriteArguments {
  int threads = default_threads();
  std::string memory = "64M", part;
  void add(CLI::App& command, WriteOptions& options);
  Status apply(WriteOptions& options) const;
};

/// A report for machines, on standard output.
void print_json(const Json& report);
/// Its warnings for people, on standard error.
void print_warnings(const Json& report);

/// What a part did, for people.
void print_part(const Json& report);

/// --json and --quiet of all commands but inspect.
struct ReportArguments {
  bool json = false, quiet = false;
  void add(CLI::App& command);
  /// Prints the report for machines, or its warnings, which --quiet does not hide: they say what is
  /// lost. Returns whether a summary follows.
  bool print(const Json& report) const;
};

}  // namespace lowbit::ckpt
