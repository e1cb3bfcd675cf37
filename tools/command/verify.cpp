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
      fmt::print("{}: {}, {} tensors, {} values, {}: structure, checksums and values hold\n",
                 report["path"].get<std::string>(), report["container"].get<std::string>(),
                 report["checked"]["tensors"].get<uint64_t>(),
                 report["checked"]["values"].get<uint64_t>(),
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
  CLI::App* command =
      app.add_subcommand("verify", "Whether a checkpoint is whole: structure, checksums, values");
  command->add_option("PATH", given->path, "The checkpoint")->required();
  command->add_flag("--no-values", given->no_values, "Skip the check for NaN and infinity");
  command->add_flag("--opaque", given->options.opaque,
                    "Let values pass that are no plain data; torch would run what they name");
  given->options.threads = default_threads();
  command->add_option("--threads", given->options.threads, "Threads that read")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  add_selection(*command, given->options.select);
  given->report.add(*command);
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
