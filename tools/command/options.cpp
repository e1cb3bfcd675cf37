#include "command/options.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <thread>

#include "command/errors.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The natural number at the start of `text`, which is moved behind it.
bool take_number(std::string_view& text, uint64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

Result<std::vector<int64_t>> numbers(std::string_view text, char between, const char* what) {
  std::vector<int64_t> out;
  const std::string given = printable(text);
  while (true) {
    uint64_t n = 0;
    if (!take_number(text, n) || n > 65536)
      return usage(
          fmt::format("{} '{}' is not a list of numbers such as 2{}2", what, given, between));
    out.push_back(static_cast<int64_t>(n));
    if (text.empty()) return out;
    if (text[0] != between)
      return usage(
          fmt::format("{} '{}' is not a list of numbers such as 2{}2", what, given, between));
    text.remove_prefix(1);
  }
}

/// "3/8": part 3 of 8.
Result<Part> parse_part(const std::string& text) {
  Part part;
  const size_t slash = text.find('/');
  const char *end = text.data() + text.size(), *middle = text.data() + std::min(slash, text.size());
  const auto first = std::from_chars(text.data(), middle, part.number);
  if (slash == std::string::npos || first.ec != std::errc() || first.ptr != middle)
    return usage(fmt::format("--part takes I/N, such as 0/8, not '{}'", printable(text)));
  const auto second = std::from_chars(middle + 1, end, part.count);
  if (second.ec != std::errc() || second.ptr != end)
    return usage(fmt::format("--part takes I/N, such as 0/8, not '{}'", printable(text)));
  return part;
}

}  // namespace

Result<uint64_t> parse_size(const std::string& text) {
  std::string_view rest = text;
  uint64_t n = 0;
  const Error no = usage("'" + printable(text) + "' is not a size such as 512M or 2GiB");
  if (!take_number(rest, n)) return no;
  if (rest.empty() || rest == "B") return n;
  const size_t unit = std::string_view("KMGT").find(rest[0]);
  const std::string_view tail = rest.substr(1);
  if (unit == std::string_view::npos || !(tail.empty() || tail == "B" || tail == "iB")) return no;
  const auto shift = 10 * static_cast<unsigned>(unit + 1);
  if (n > UINT64_MAX >> shift) return no;
  return n << shift;
}

Result<Mesh> parse_mesh(const std::string& parts, const std::string& dims) {
  Mesh mesh;
  ASSIGN_OR_RETURN(sizes, numbers(parts, 'x', "the mesh"));
  mesh.parts = std::move(sizes);
  mesh.dims.clear();
  if (dims.empty()) {
    for (size_t i = 0; i < mesh.parts.size(); ++i) mesh.dims.push_back(static_cast<int>(i));
    return mesh;
  }
  ASSIGN_OR_RETURN(list, numbers(dims, ',', "the list of tensor dimensions"));
  for (const int64_t d : list) mesh.dims.push_back(static_cast<int>(d));
  if (mesh.dims.size() != mesh.parts.size())
    return usage(fmt::format("a mesh of {} dimensions needs as many tensor dimensions, not {}",
                             mesh.parts.size(), mesh.dims.size()));
  return mesh;
}

std::string size_text(uint64_t bytes) {
  if (bytes < 10000) return fmt::format("{} B", bytes);
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double n = static_cast<double>(bytes);
  int u = 0;
  for (; n >= 1024 && u < 4; ++u) n /= 1024;
  return fmt::format("{:.1f} {}", n, units[u]);
}

std::string counted(uint64_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

int default_threads() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
}

CLI::Validator whole_number(int64_t least, int64_t most) {
  return {[least, most](const std::string& text) {
            int64_t number = 0;
            const char* end = text.data() + text.size();
            const auto read = std::from_chars(text.data(), end, number);
            // A number that begins with 0 would be read as octal.
            const bool decimal = text == "0" || !text.starts_with('0');
            if (decimal && read.ec == std::errc() && read.ptr == end && number >= least &&
                number <= most)
              return std::string();
            return fmt::format("takes a whole number from {} to {}, not '{}'", least, most,
                               printable(text));
          },
          ""};
}

void add_place(CLI::App& command, const char* name, std::string& value, const char* about) {
  command.add_option(name, value, about)->required()->option_text("REQUIRED");
}

void repeat(CLI::Option* option, const char* type) {
  option->type_name(type)->option_text(type)->allow_extra_args(false);
}

void add_selection(CLI::App& command, Selection& selection) {
  repeat(command.add_option("--include", selection.include,
                            "Only names that match GLOB (*, ?, [ab]); may be repeated"),
         "GLOB");
  repeat(command.add_option("--exclude", selection.exclude,
                            "Skip names that match GLOB; may be repeated"),
         "GLOB");
}

void add_model(CLI::App& command, const std::string& whose, std::string& model) {
  command
      .add_option("--model", model,
                  "A checkpoint with the weights, if " + whose +
                      " lacks its parameters' shapes or names; for names, model.state_dict() as "
                      "the program saved it with torch.save")
      ->type_name("PATH");
}

void WriteArguments::add(CLI::App& command, WriteOptions& options) {
  command
      .add_option("--part", part,
                  "Write part I of N of a directory, counted from 0. Run all N, in any order, on "
                  "machines that share a file system; the last one publishes TARGET. Rerun a part "
                  "that was killed")
      ->type_name("I/N");
  command.add_option("--threads", threads, "Threads that read and write, 1 to 256")
      ->check(whole_number(1, 256))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--memory-limit", memory,
                  "Maximum size of all buffers, such as 512M; at least 1M")
      ->type_name("SIZE")
      ->capture_default_str();
  command.add_flag("--force", options.replace, "Replace TARGET if it exists and is a checkpoint");
}

Status WriteArguments::apply(WriteOptions& options) const {
  ASSIGN_OR_RETURN(bytes, parse_size(memory));
  constexpr uint64_t kMin = 1u << 20;
  if (bytes < kMin) return usage("--memory-limit must be at least 1M");
  options.threads = threads;
  options.memory = bytes;
  if (part.empty()) return fine();
  ASSIGN_OR_RETURN(parsed, parse_part(part));
  options.part = parsed;
  return fine();
}

void print_json(const Json& report) {
  fmt::print("{}\n", report.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_warnings(const Json& report) {
  for (const Json& warning : report["warnings"])
    print_error(fmt::format("warning: {}\n", warning.get<std::string>()));
}

void print_part(const Json& report) {
  const std::string part = report["part"].get<std::string>();
  if (report["published"].get<bool>())
    return fmt::print("part {}: all parts are there, and {} is published\n", part,
                      report["target"].get<std::string>());
  std::string missing;
  for (const Json& i : report["missing"])
    missing += (missing.empty() ? "" : ", ") + std::to_string(i.get<uint64_t>());
  fmt::print("part {} is written; still to come: {}\n", part, missing);
}

void ReportArguments::add(CLI::App& command) {
  command.add_flag("--json", json, "Print the report as JSON");
  command.add_flag("--quiet", quiet, "Print warnings and errors only");
}

bool ReportArguments::print(const Json& report) const {
  if (json) {
    print_json(report);
    return false;
  }
  print_warnings(report);
  return !quiet;
}

}  // namespace lowbit::ckpt
