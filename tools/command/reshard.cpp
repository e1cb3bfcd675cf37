// `lowbit-ckpt reshard`: the same checkpoint for another number of ranks.
#include <fmt/core.h>

#include "command/command.h"
#include "command/options.h"
#include "command/progress.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

struct ReshardArguments {
  std::string source, target, mesh, dims;
  int64_t ranks = 0;
  WriteArguments write;
  ReportArguments report;
  ReshardOptions options;
};

Status run(ReshardArguments& given) {
  WriteOptions& write = given.options.write;
  if (given.mesh.empty() == (given.ranks == 0))
    return usage("pass either --world-size N or --mesh NxM");
  ASSIGN_OR_RETURN(
      mesh, parse_mesh(given.mesh.empty() ? std::to_string(given.ranks) : given.mesh, given.dims));
  write.mesh = mesh;
  RETURN_IF_ERROR(given.write.apply(write));
  ProgressBar bar("reshard", given.report.quiet);
  write.progress = bar.function();
  const auto done = reshard(given.source, given.target, given.options);
  bar.clear();
  if (!done.ok()) return done.error();
  const Json& report = done.value();
  if (!given.report.print(report)) return fine();
  const auto number = [&](const char* key) { return report[key].get<uint64_t>(); };
  fmt::print("{}{} -> {}: {}, {} in {} ({} copied as they {}), {}, {}{}\n",
             given.options.dry_run ? "would write " : "", report["source"].get<std::string>(),
             report["target"].get<std::string>(),
             counted(static_cast<uint64_t>(write.mesh.ranks()), "rank"),
             counted(number("tensors"), "tensor"), counted(number("chunks"), "chunk"),
             number("copied"), given.options.dry_run ? "are" : "were",
             counted(number("values"), "value"), size_text(number("bytes")),
             write.part ? " in the whole target" : "");
  if (write.part && !given.options.dry_run) print_part(report);
  if (given.options.dry_run) fmt::print("{} would be recut\n", counted(number("recut"), "tensor"));
  return fine();
}

}  // namespace

void add_reshard(CLI::App& app, std::function<Status()>& chosen) {
  const auto given = std::make_shared<ReshardArguments>();
  CLI::App* command = app.add_subcommand(
      "reshard", "Write a checkpoint as a directory for another number of ranks");
  add_place(*command, "SOURCE", given->source, "The checkpoint, in any container");
  add_place(*command, "TARGET", given->target,
            "The folder to write; it appears whole or not at all");
  command
      ->add_option(
          "--world-size", given->ranks,
          "Number of ranks, 1 to 65536; rows are cut into parts of ceil(rows / N), as FSDP2 "
          "does")
      ->check(whole_number(1, 65536))
      ->type_name("N");
  command->add_option("--mesh", given->mesh, "Ranks along each dimension of a mesh, such as 2x2")
      ->type_name("NxM");
  command
      ->add_option("--dims", given->dims,
                   "The tensor dimension that each mesh dimension cuts, such as 0,1 (the default)")
      ->type_name("D,E");
  add_selection(*command, given->options.select);
  command->add_flag("--requantize", given->options.requantize,
                    "Make new codes where a cut falls inside a block of torchao's quantized state, "
                    "which is an error otherwise");
  command->add_flag("--dry-run", given->options.dry_run,
                    "Show what would be done and write nothing");
  given->write.add(*command, given->options.write);
  given->report.add(*command);
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
