// `lowbit-ckpt verify`: whether a checkpoint is whole.
#include <fmt/core.h>

#include "command/command.h"
#include "command/options.h"
#include "command/progress.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

struct VerifyArguments {
  std::string path;
  bool no_values = false;
  ReportArguments report;
  VerifyOptions options;
};

Status run(VerifyArguments& given) {
  ProgressBar bar("verify", given.report.quiet);
  given.options.progress = bar.function();
  given.options.finite = !given.no_values;
  ASSIGN_OR_RETURN(report, verify(given.path, given.options));
  bar.clear();
  const Json& findings = report["findings"];
  if (given.report.json) {
    print_json(report);
  } else {
    print_warnings(report);
    for (const Json& f : findings)
      fmt::print("{}: {}\n", f["tensor"].get<std::string>(), f["what"].get<std::string>());
    if (!given.report.quiet && findings.empty()) {
      fmt::print("{}: {}, {}, {}, {}: structure, checksums and values hold\n",
                 report["path"].get<std::string>(), report["container"].get<std::string>(),
                 counted(report["checked"]["tensors"].get<uint64_t>(), "tensor"),
                 counted(report["checked"]["values"].get<uint64_t>(), "value"),
                 size_text(report["checked"]["bytes"].get<uint64_t>()));
    }
  }
  if (findings.empty()) return fine();
  return mismatch(
      report["path"].get<std::string>() + ": " +
      (findings.size() == 1 ? "one finding: "
                            : std::to_string(findings.size()) + " findings, the first: ") +
      findings[0]["tensor"].get<std::string>() + ": " + findings[0]["what"].get<std::string>());
}

}  // namespace

void add_verify(CLI::App& app, std::function<Status()>& chosen) {
  const auto given = std::make_shared<VerifyArguments>();
  CLI::App* command = app.add_subcommand("verify", "Check structure, checksums and values");
  add_place(*command, "PATH", given->path, "The checkpoint");
  command->add_flag("--no-values", given->no_values, "Skip the check for NaN and infinity");
  command->add_flag("--opaque", given->options.opaque,
                    "Warn about opaque objects instead of failing");
  given->options.threads = default_threads();
  command->add_option("--threads", given->options.threads, "Threads that read, 1 to 256")
      ->check(whole_number(1, 256))
      ->type_name("N")
      ->capture_default_str();
  add_selection(*command, given->options.select);
  given->report.add(*command);
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
