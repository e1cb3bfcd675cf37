// `lowbit-ckpt reshard`: the same checkpoint for another number of ranks.
#include <fmt/core.h>

#include "command/command.h"
#include "command/progress.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

struct Arguments {
  std::string source, target;
  int64_t ranks = 0;
  bool quiet = false;
  ReshardOptions options;
};

Status run(Arguments& given) {
  ProgressBar bar("reshard", given.quiet);
  given.options.write.mesh.parts = {given.ranks};
  given.options.write.progress = bar.function();
  LB_TRY(report, reshard(given.source, given.target, given.options));
  if (given.quiet) return fine();
  fmt::print(
      "{} -> {}: {} ranks, {} tensors in {} chunks ({} copied as they were), {} values, {:.1f} "
      "MiB\n",
      report["source"].get<std::string>(), report["target"].get<std::string>(), given.ranks,
      report["tensors"].get<uint64_t>(), report["chunks"].get<uint64_t>(),
      report["copied"].get<uint64_t>(), report["values"].get<uint64_t>(),
      static_cast<double>(report["bytes"].get<uint64_t>()) / 1048576.0);
  return fine();
}

}  // namespace

void add_reshard(CLI::App& app, std::function<Status()>& chosen) {
  const auto given = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("reshard", "Write a checkpoint for another number of ranks");
  command->add_option("SRC", given->source, "The checkpoint")->required();
  command->add_option("DST", given->target, "The folder to write; it appears whole or not at all")
      ->required();
  command->add_option("--world-size", given->ranks, "Number of ranks")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{65536}));
  command->add_flag("--force", given->options.write.replace, "Replace DST where it exists");
  command->add_flag("--quiet", given->quiet, "Say nothing");
  command->callback([given, &chosen] { chosen = [given] { return run(*given); }; });
}

}  // namespace lowbit::ckpt
