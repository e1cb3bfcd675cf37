// lowbit-ckpt: checkpoints of PyTorch optimizers, without torch, without Python, and without
// executing anything that is in them.
#include <fmt/core.h>

#include "command/command.h"
#include "command/signals.h"

int main(int argc, char** argv) {
  using namespace lowbit::ckpt;
  CLI::App app(
      "Looks into checkpoints of PyTorch and reshards them. Nothing in a file is ever executed.");
  app.set_version_flag("--version", "lowbit-ckpt " LOWBIT_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 fine, 1 runtime error, 2 usage, 3 bad or unsafe input, 4 mismatch.");
  std::function<Status()> chosen;
  for (const AddCommand add : {add_inspect, add_convert, add_reshard, add_verify, add_diff}) add(app, chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : static_cast<int>(Exit::kUsage);
  }
  watch_signals();
  try {
    const Status done = chosen();
    if (done.ok()) return 0;
    fmt::print(stderr, "lowbit-ckpt: {}\n", done.error().text);
    return static_cast<int>(done.error().code);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "lowbit-ckpt: not enough memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "lowbit-ckpt: {}\n", error.what());
  }
  return static_cast<int>(Exit::kRuntime);
}
