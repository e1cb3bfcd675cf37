// `lowbit-ckpt diff`: where two checkpoints differ.
#include <fmt/core.h>

#include <charconv>
#include <cmath>

#include "command/command.h"
#include "command/errors.h"
#include "command/options.h"
#include "command/progress.h"
#include "io/text.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

struct DiffArguments {
  std::string first, second;
  ReportArguments report;
  DiffOptions options;
};

/// Of `error_number`.
std::string short_text(const Json& number) {
  return number.is_string() ? number.get<std::string>()
                            : fmt::format("{:.3g}", number.get<double>());
}

void print_differences(const Json& report) {
  for (const Json& d : report["differences"]) {
    fmt::print("{}: {}", d["name"].get<std::string>(), d["what"].get<std::string>());
    if (d.contains("max"))
      fmt::print(", by at most {}, {} of the norm", short_text(d["max"]),
                 short_text(d["relative"]));
    fmt::print("\n");
  }
  if (report["differences"].empty())
    fmt::print("the same, by {}\n", report["by"].get<std::string>());
}

Status run(DiffArguments& given) {
  ProgressBar bar("diff", given.report.quiet);
  given.options.progress = bar.function();
  ASSIGN_OR_RETURN(report, diff(given.first, given.second, given.options));
  bar.clear();
  const Json& differences = report["differences"];
  if (given.report.json) {
    print_json(report);
  } else {
    print_warnings(report);
    if (const size_t opaque = report["opaque"].size(); opaque > 0)
      print_error(fmt::format("warning: {} opaque object{} not compared, such as {}\n", opaque,
                              opaque == 1 ? " was" : "s were",
                              report["opaque"][0].get<std::string>()));
    if (!given.report.quiet) print_differences(report);
  }
  if (differences.empty()) return fine();
  return mismatch(fmt::format("{} differ{} between {} and {}", differences.size(),
                              differences.size() == 1 ? "ence" : "ences",
                              report["first"].get<std::string>(),
                              report["second"].get<std::string>()));
}

}  // namespace

void add_diff(CLI::App& app, std::function<Status()>& chosen) {
  const auto given = std::make_shared<DiffArguments>();
  CLI::App* command = app.add_subcommand("diff", "Compare two checkpoints by value");
  add_place(*command, "A", given->first, "A checkpoint");
  add_place(*command, "B", given->second, "Another");
  command->add_flag("--bytes", given->options.bytes, "Compare stored bytes instead of values");
  command
      ->add_option(
          "--tolerance", given->options.tolerance,
          "Largest allowed difference of a tensor, relative to the larger 2-norm, such as 0.02")
      ->type_name("T")
      ->check([](const std::string& text) {
        double number = 0;
        const char* end = text.data() + text.size();
        const auto read = std::from_chars(text.data(), end, number);
        const bool fits =
            read.ec == std::errc() && read.ptr == end && number >= 0 && std::isfinite(number);
        return fits ? "" : "takes a number from 0 on, such as 0.02, not '" + printable(text) + "'";
      });
  add_model(*command, "A or B", given->options.model);
  add_selection(*command, given->options.select);
  given->report.add(*command);
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
