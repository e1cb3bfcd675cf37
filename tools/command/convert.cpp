// `lowbit-ckpt convert`: the same training state as another optimizer, format or container has it.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>

#include "command/command.h"
#include "command/options.h"
#include "command/progress.h"
#include "io/text.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

struct ConvertArguments {
  std::string source, target;
  std::optional<std::string> seed;
  int64_t ranks = 0;
  WriteArguments write;
  ReportArguments report;
  ConvertOptions options;
};

double error_of(const Json& state, const char* key) {
  if (!state.contains(key)) return 0;
  return state[key].is_number() ? state[key].get<double>() : HUGE_VAL;
}

/// What happened to how many states, and those that lost most.
void print_states(const Json& report) {
  struct Row {
    size_t count = 0;
    bool exact = true;
    double limit = 0, relative = 0;
  };
  std::map<std::tuple<std::string, std::string, std::string>, Row> rows;
  std::vector<Json> worst;
  for (const Json& s : report["states"]) {
    Row& row = rows[{s["state"].get<std::string>(), s["from"].get<std::string>(),
                     s["to"].get<std::string>()}];
    ++row.count;
    row.exact &= s["exact"].get<bool>();
    row.limit = std::max(row.limit, error_of(s, "max_error"));
    row.relative = std::max(row.relative, error_of(s, "relative_error"));
    if (error_of(s, "relative_error") > 0) worst.push_back(s);
  }
  const bool plan = report["dry_run"].get<bool>();
  for (const auto& [key, row] : rows) {
    const auto& [state, from, to] = key;
    fmt::print(
        "  {:>5} x {:<16} {} -> {}  {}\n", row.count, state, from, to,
        row.exact ? "exact"
        : plan    ? "rounded"
               : fmt::format("max error {:.3g}, relative {:.3g} at most", row.limit, row.relative));
  }
  std::ranges::sort(worst, [](const Json& a, const Json& b) {
    return error_of(a, "relative_error") > error_of(b, "relative_error");
  });
  if (worst.size() < 2) return;
  fmt::print("\n  largest relative errors\n");
  for (size_t i = 0; i < std::min<size_t>(worst.size(), 5); ++i)
    fmt::print("  {:.3g}  {} {} (max {:.3g})\n", error_of(worst[i], "relative_error"),
               worst[i]["param"].get<std::string>(), worst[i]["state"].get<std::string>(),
               error_of(worst[i], "max_error"));
}

/// --seed: a number, where something is rounded by chance.
Status read_seed(const std::optional<std::string>& given, ConvertOptions& options) {
  if (!given) return fine();
  const std::string& text = *given;
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, options.seed);
  if (read.ec != std::errc() || read.ptr != end)
    return usage("--seed takes a whole number from 0 to 18446744073709551615, not '" +
                 printable(text) + "'");
  if (options.weights.ends_with("_stochastic")) return fine();
  return usage(
      "--seed is for formats that round at random, such as --weights "
      "bfloat16_stochastic, and " +
      printable(options.weights) + " does not; leave it out");
}

Status run(ConvertArguments& given) {
  RETURN_IF_ERROR(read_seed(given.seed, given.options));
  WriteOptions& write = given.options.write;
  write.mesh.parts.clear();
  if (given.ranks > 0) write.mesh.parts = {given.ranks};
  RETURN_IF_ERROR(given.write.apply(write));
  ProgressBar bar("convert", given.report.quiet);
  write.progress = bar.function();
  const auto done = convert(given.source, given.target, given.options);
  bar.clear();
  if (!done.ok()) return done.error();
  const Json& report = done.value();
  if (!given.report.print(report)) return fine();
  const auto text = [&](const char* key) { return report[key].get<std::string>(); };
  const auto number = [&](const char* key) { return report[key].get<uint64_t>(); };
  const std::string way = text("to").empty() ? "" : ", " + text("from") + " to " + text("to");
  fmt::print("{}{} -> {} ({}{}): {} -> {}, {}, {}{}\n", given.options.dry_run ? "would write " : "",
             text("source"), text("target"), text("container"), way,
             size_text(number("source_bytes")), size_text(number("bytes")),
             counted(number("tensors"), "tensor"), counted(number("values"), "value"),
             write.part ? " in the whole target" : "");
  if (write.part && !given.options.dry_run) print_part(report);
  print_states(report);
  for (const Json& note : report["notes"]) fmt::print("\n  {}\n", note.get<std::string>());
  return fine();
}

/// The dialect of the source, that of the target, and the target's format.
void add_state(CLI::App& command, ConvertOptions& options) {
  command
      .add_option("--to", options.to,
                  fmt::format("The library whose optimizer will load TARGET: {}; without it only "
                              "the container changes",
                              fmt::join(written_dialect_names(), ", ")))
      ->type_name("DIALECT");
  command.add_option("--from", options.from, "The source's dialect, if it is not recognized")
      ->type_name("DIALECT");
  command
      .add_option(
          "--optimizer", options.optimizer,
          "The path of the optimizer to convert, if SOURCE has several, such as optimizers.0; the "
          "others stay as they are")
      ->type_name("PATH");
  repeat(command.add_option(
             "--group", options.members,
             "Parameters whose names match PATTERN are in group N of Megatron-Core's common "
             "state, such as '1=*.bias'; may be repeated"),
         "N=PATTERN");
  command
      .add_option(
          "--state-format", options.wanted.state_format,
          "The format of TARGET's state: a preset (8bit, 4bit, fp8, log8, factored4, float32, "
          "...) or a state format; without it codes stay as they are and float32 state "
          "takes the dialect's default")
      ->type_name("FORMAT");
  command.add_option("--block", options.wanted.block, "Values that share a scale, 32 to 2048")
      ->check(whole_number(32, 2048))
      ->type_name("N");
  repeat(command.add_option(
             "--full-precision", options.wanted.full_precision,
             "Parameters whose names match PATTERN keep float32 state, such as '*embed*'; may "
             "be repeated"),
         "PATTERN");
}

}  // namespace

void add_convert(CLI::App& app, std::function<Status()>& chosen) {
  const auto given = std::make_shared<ConvertArguments>();
  ConvertOptions& options = given->options;
  CLI::App* command = app.add_subcommand(
      "convert", "Write a checkpoint for another optimizer, state format or container");
  add_place(*command, "SOURCE", given->source, "The checkpoint, in any container");
  add_place(*command, "TARGET", given->target,
            "The folder or file to write; it appears whole or not at all");
  add_state(*command, options);
  command
      ->add_option("--container", options.container,
                   alternatives(container_names()) +
                       "; by default TARGET's name decides, else SOURCE's container")
      ->type_name("KIND");
  command
      ->add_option("--world-size", given->ranks,
                   "Ranks of a directory, 1 to 65536; by default as many as SOURCE has")
      ->check(whole_number(1, 65536))
      ->type_name("N");
  command->add_flag("--keep", options.wanted.keep, "Fail rather than round or requantize");
  command->add_flag("--lossy", options.wanted.lossy,
                    "Drop what the target cannot store, with a warning");
  add_model(*command, "SOURCE", options.model);
  command
      ->add_option(
          "--weights", options.weights,
          "Also round float32 weights: bfloat16, bfloat16_stochastic, float16, or a format "
          "with correction bits, such as bfloat16_split16, which go into the state")
      ->type_name("FORMAT");
  command->add_option("--seed", given->seed, "Seed of --weights' stochastic rounding")
      ->needs("--weights")
      ->type_name("N")
      ->option_text("N");
  add_selection(*command, options.select);
  command->add_flag("--dry-run", options.dry_run, "Show what would be done and write nothing");
  given->write.add(*command, options.write);
  given->report.add(*command);
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
