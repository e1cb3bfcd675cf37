#include "command/examples.h"

#include <sstream>

namespace lowbit::ckpt {
namespace {

constexpr Example kExamples[] = {
    {"inspect", "What is in a checkpoint: a directory of torch.distributed.checkpoint, or a file",
     "inspect step-1000", true},
    {"inspect", "The same with how well its numbers are used, as a page with pictures",
     "inspect step-1000 --html step-1000.html", false},
    {"inspect", "Only the second moments, for another program",
     "inspect step-1000 --json --include '*.exp_avg_sq'", false},
    {"verify", "Whether it is whole: structure, checksums, and no value that is not finite",
     "verify step-1000", true},
    {"convert", "Continue a float32 run (FSDP, DDP, one process) in 8 bits",
     "convert step-1000 step-1000-8bit --to lowbit --state-format 8bit", true},
    {"convert", "bitsandbytes to torchao, without a change to any number",
     "convert bnb.pt ao.pt --to torchao", true},
    {"convert", "A directory into one file of torch.save", "convert step-1000 step-1000.pt", true},
    {"convert", "Back to float32, as torch's own optimizer keeps it",
     "convert step-1000-8bit step-1000-float32 --to torch", false},
    {"convert", "Into safetensors; nothing is lost on the way there and back",
     "convert step-1000 step-1000.safetensors", false},
    {"convert", "What would be done", "convert step-1000 somewhere --to lowbit --dry-run", false},
    {"reshard", "For 8 ranks", "reshard step-1000 step-1000-on-8 --world-size 8", true},
    {"reshard", "For a mesh of 2 by 2: the first cuts rows, the second columns",
     "reshard step-1000 step-1000-on-2x2 --mesh 2x2", false},
    {"diff", "Where two differ, by what they mean, however they are kept",
     "diff step-1000 step-1000-on-8", true},
    {"diff", "The same where up to 2 percent of a tensor may be lost",
     "diff step-1000 step-1000-8bit --tolerance 0.02", false},
    {"completion", "Completions for bash; the package installs them too",
     "completion bash > lowbit-ckpt.bash", false},
};

bool can(const CLI::App& app, const Example& example) {
  const auto commands = app.get_subcommands(
      [&](const CLI::App* command) { return command->get_name() == example.command; });
  if (commands.empty()) return false;
  std::istringstream words(example.line);
  for (std::string word; words >> word;) {
    if (word.starts_with("--") && commands[0]->get_option_no_throw(word) == nullptr) return false;
  }
  return true;
}

}  // namespace

std::vector<Example> examples(const CLI::App& app) {
  std::vector<Example> out;
  for (const Example& e : kExamples) {
    if (can(app, e)) out.push_back(e);
  }
  return out;
}

std::string examples_text(const CLI::App& app, const std::string& command) {
  std::string out;
  for (const Example& e : examples(app)) {
    if (command.empty() ? !e.common : command != e.command) continue;
    if (out.empty()) out = "Examples:\n";
    out += std::string("  # ") + e.about + "\n  lowbit-ckpt " + e.line + "\n";
  }
  return out;
}

}  // namespace lowbit::ckpt
