// `lowbit-ckpt inspect`: what is in a checkpoint.
#include <fmt/core.h>

#include <algorithm>

#include "command/command.h"
#include "command/options.h"
#include "command/progress.h"
#include "io/write/new_file.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

struct InspectArguments {
  std::string path, html;
  bool json = false, quiet = false, force = false;
  InspectOptions options;
};

std::string line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// One line for each state.
void print_health(const Json& out) {
  if (out["states"].empty()) return;
  fmt::print("\n{:<48} {:>8} {:>10} {:>9} {:>9} {:>8}  {}\n", "state", "zero", "saturated", "least",
             "most", "not fin.", "stored as");
  const auto share = [](const Json& h, const char* key) {
    const auto of = h["elements"].get<double>();
    return h.contains(key) && of > 0 ? fmt::format("{:.2f}%", 100 * h[key].get<double>() / of) : "";
  };
  for (const Json& s : out["states"]) {
    const std::string name =
        s["parameter"].get<std::string>() + "." + s["state"].get<std::string>();
    if (!s.contains("health")) {  // numbers that are not known, such as a weight's compensation
      fmt::print("{:<48} {:>8} {:>10} {:>9} {:>9} {:>8}  {}\n", name, "", "", "", "", "",
                 s["stored_as"].get<std::string>());
      continue;
    }
    const Json& h = s["health"];
    fmt::print("{:<48} {:>8} {:>10} {:>9.1e} {:>9.1e} {:>8}  {}\n", name, share(h, "zero"),
               share(h, "saturated"), h["least"].get<double>(), h["most"].get<double>(),
               h["nan"].get<uint64_t>() + h["infinite"].get<uint64_t>(),
               s["stored_as"].get<std::string>());
  }
}

/// The summary of the whole checkpoint.
void print_summary(const Json& out) {
  if (out["dialect"].is_string())
    fmt::print("  {} {}\n", out["dialect"].get<std::string>(),
               out["algorithm"] == "" ? "(an optimizer that is not known)"
                                      : out["algorithm"].get<std::string>());
  for (const Json& fact : out["facts"]) fmt::print("  {}\n", fact.get<std::string>());
  for (const Json& warning : out["warnings"])
    fmt::print("  warning: {}\n", warning.get<std::string>());
  for (const Json& step : out["steps"]) fmt::print("  step {:.0f}\n", step.get<double>());
}

void print_tensors(const Json& tensors) {
  size_t width = 4, type_width = 10, shape_width = 16;
  for (const Json& t : tensors) {
    width = std::max(width, t["name"].get<std::string>().size());
    type_width = std::max(type_width, t["dtype"].get<std::string>().size());
    shape_width = std::max(shape_width, shape_text(t["shape"].get<Shape>()).size());
  }
  fmt::print("\n{:<{}}  {:<{}} {:>{}} {:>7} {:>12}\n", "name", width, "dtype", type_width, "shape",
             shape_width, "chunks", "bytes");
  for (const Json& t : tensors) {
    const std::string dtype = t["dtype"].get<std::string>(), kept = t.value("stored_as", dtype);
    fmt::print("{:<{}}  {:<{}} {:>{}} {:>7} {:>12}{}\n", t["name"].get<std::string>(), width, dtype,
               type_width, shape_text(t["shape"].get<Shape>()), shape_width,
               t["chunks"].get<size_t>(), t["bytes"].get<uint64_t>(),
               kept == dtype ? "" : "  " + kept);
  }
}

void print_values(const Json& values) {
  if (!values.empty()) fmt::print("\n");
  for (const auto& [name, value] : values.items()) {
    std::string text = line(value);
    if (text.size() > 100) {
      size_t end = 97;  // not inside a character
      while ((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
      text = text.substr(0, end) + "...";
    }
    fmt::print("{} = {}\n", name, text);
  }
}

void print_sums(const Json& out) {
  fmt::print("\n");
  for (const char* key : {"bytes_by_dtype", "bytes_by_kind"}) {
    for (const auto& [name, sum] : out[key].items())
      fmt::print("{:<32} {:>6} {:<7} {:>12}\n", name, sum["tensors"].get<uint64_t>(),
                 sum["tensors"] == 1 ? "tensor" : "tensors",
                 size_text(sum["bytes"].get<uint64_t>()));
  }
}

Status write_page(const InspectArguments& given, const Json& out) {
  if (given.force) RETURN_IF_ERROR(NewFile::check_page(given.html));
  ASSIGN_OR_RETURN(page, NewFile::create(given.html, given.force, {given.path}));
  RETURN_IF_ERROR(page->output().write(html_page(out)));
  return page->commit();
}

Status run(InspectArguments& given) {
  if (given.force && given.html.empty())
    return usage("--force replaces FILE of --html, and inspect writes nothing else: give --html");
  ProgressBar bar("reading", given.quiet);
  given.options.progress = bar.function();
  given.options.health = given.options.health || !given.html.empty();
  ASSIGN_OR_RETURN(out, inspect(given.path, given.options));
  if (!given.html.empty()) {
    RETURN_IF_ERROR(write_page(given, out));
    if (!given.json) return fine();
  }
  if (given.json) {
    print_json(out);
    return fine();
  }
  fmt::print("{}\n  {}, {}, {}, {}, {}\n", out["path"].get<std::string>(),
             out["container"].get<std::string>(), counted(out["files"].get<size_t>(), "file"),
             counted(out["tensors"].size(), "tensor"), counted(out["values"].size(), "value"),
             size_text(out["bytes"].get<uint64_t>()));
  bar.clear();
  print_summary(out);
  print_tensors(out["tensors"]);
  print_values(out["values"]);
  if (given.options.health) print_health(out);
  print_sums(out);
  if (given.options.digest) fmt::print("digest {}\n", out["digest"].get<std::string>());
  return fine();
}

}  // namespace

void add_inspect(CLI::App& app, std::function<Status()>& chosen) {
  const auto given = std::make_shared<InspectArguments>();
  CLI::App* command = app.add_subcommand("inspect", "Show what a checkpoint contains");
  add_place(*command, "PATH", given->path, "The checkpoint");
  command->add_option("--html", given->html, "Write a page for a browser, with plots of the state")
      ->type_name("FILE");
  command->add_flag("--force", given->force, "Replace FILE of --html if it exists");
  command->add_flag("--json", given->json, "Print the report as JSON");
  command->add_flag("--digest", given->options.digest,
                    "Read everything and print a digest that does not depend on the sharding");
  command->add_flag(
      "--health", given->options.health,
      "Read everything: shares of zero and saturated codes, ranges, NaN and infinity");
  add_selection(*command, given->options.select);
  command->add_flag("--quiet", given->quiet, "No progress bar");
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
