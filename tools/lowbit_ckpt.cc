// lowbit-ckpt: looks into checkpoints and reshards them, without torch, without Python, and without
// executing anything that is in them.
#include <fmt/core.h>

#include <CLI/CLI.hpp>

#include "command/inspect.h"
#include "command/progress.h"
#include "container/dcp.h"
#include "pipeline/reshard.h"

namespace {

using namespace lowbit::ckpt;

struct ReshardOptions {
  std::string source, target;
  int64_t ranks = 0;
  bool force = false, quiet = false;
};

Status run_reshard(const ReshardOptions& options) {
  LB_TRY(manifest, read_dcp(options.source));
  ProgressBar bar("reshard", options.quiet);
  LB_TRY(report, reshard(manifest, options.target, options.ranks, options.force, bar.function()));
  if (!options.quiet) {
    fmt::print(
        "{} -> {}: {} ranks, {} tensors in {} chunks ({} copied as they were), {} values, {:.1f} "
        "MiB\n",
        printable(options.source), printable(options.target), options.ranks, report.tensors,
        report.chunks, report.copied, report.blobs, static_cast<double>(report.bytes) / 1048576.0);
  }
  return fine();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Looks into checkpoints of torch.distributed.checkpoint and reshards them. Nothing in a file "
      "is ever executed.");
  app.set_version_flag("--version", "lowbit-ckpt " LOWBIT_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 fine, 1 runtime error, 2 usage, 3 bad or unsafe input, 4 mismatch.");

  InspectOptions look;
  CLI::App* inspect_command = app.add_subcommand("inspect", "What is in a checkpoint");
  inspect_command->add_option("DIR", look.path, "The checkpoint")->required();
  inspect_command->add_flag("--json", look.json, "For machines");
  inspect_command->add_flag(
      "--digest", look.digest,
      "Read everything and print a digest that does not depend on how it is sharded");
  inspect_command->add_flag("--quiet", look.quiet, "No progress bar");

  ReshardOptions move;
  CLI::App* reshard_command =
      app.add_subcommand("reshard", "Write a checkpoint for another number of ranks");
  reshard_command->add_option("SRC", move.source, "The checkpoint")->required();
  reshard_command
      ->add_option("DST", move.target, "The folder to write; it appears whole or not at all")
      ->required();
  reshard_command->add_option("--world-size", move.ranks, "Number of ranks")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{65536}));
  reshard_command->add_flag("--force", move.force, "Replace DST where it exists");
  reshard_command->add_flag("--quiet", move.quiet, "Say nothing");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : static_cast<int>(Exit::kUsage);
  }
  try {
    const Status done = inspect_command->parsed() ? inspect(look) : run_reshard(move);
    if (done.ok()) return 0;
    const auto& error = const_cast<Status&>(done).error();
    fmt::print(stderr, "lowbit-ckpt: {}\n", error.text);
    return static_cast<int>(error.code);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "lowbit-ckpt: not enough memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "lowbit-ckpt: {}\n", error.what());
  }
  return static_cast<int>(Exit::kRuntime);
}
