// `lowbit-ckpt man`: the manual page. Hidden; what builds the package calls it.
#include <fmt/core.h>

#include "command/command.h"
#include "command/examples.h"
#include "command/outline.h"

namespace lowbit::ckpt {
namespace {

/// Text as roff takes it: no dash becomes a hyphen, no line starts a request.
std::string roff(const std::string& text) {
  const std::string out =
      escaped(text, {{'\\', "\\e"}, {'-', "\\-"}, {'\'', "\\(aq"}, {'\n', " "}});
  return out.starts_with('.') ? "\\&" + out : out;
}

/// Words in a font, B or I, with commas between them.
std::string words_in(char font, const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words)
    out += fmt::format("{}\\f{}{}\\fR", out.empty() ? "" : ", ", font, roff(word));
  return out;
}

std::string synopsis(const Outline& command) {
  std::string out = "\\fBlowbit\\-ckpt " + command.name + "\\fR";
  for (const OutlineOption& place : command.places) out += " " + words_in('I', place.names);
  for (const OutlineOption& o : command.options) {
    if (o.required)
      out += fmt::format(" {} {}", words_in('B', {o.names.back()}), words_in('I', {o.value}));
  }
  return out + " [options]\n";
}

std::string entry(const OutlineOption& o, bool place) {
  std::string head = words_in(place ? 'I' : 'B', o.names), text = roff(o.about);
  if (!place && !o.value.empty()) head += " " + words_in('I', {o.value});
  if (!o.choices.empty())
    text += fmt::format("\n{} {}.", o.open ? "Such as" : "One of", words_in('B', o.choices));
  return fmt::format(".TP\n{}\n{}\n", head, text.empty() ? "\\&" : text);
}

constexpr const char* kDescription =
    R"(inspects, verifies, converts, reshards and compares checkpoints of PyTorch optimizers.
It contains neither torch nor Python, and it never executes a file:
it parses pickles against an allowlist into inert values, and refuses what is outside.
.PP
A checkpoint is a directory of torch.distributed.checkpoint, a file of torch.save,
a safetensors file, or a folder of DeepSpeed.
Output appears whole or not at all.
Memory stays bounded, however large the checkpoint is.
)";

constexpr const char* kExits = R"(.TP
.B 0
Success.
.TP
.B 1
I/O error: disk full, permission denied, interrupted.
.TP
.B 2
Usage error.
.TP
.B 3
The input is damaged, unsafe, or says too little for what was asked.
.TP
.B 4
A mismatch: values that are not finite, digests that do not agree, or two checkpoints that differ.
)";

constexpr const char* kFiles = R"(.TP
.I DIR/.metadata
Makes a directory a checkpoint: a pickle that says which part of which tensor lies where.
.TP
.I DIR/lowbit.json
Digests of what this program wrote.
.B verify
compares them with what it reads.
.TP
.I .NAME.partial\-XXXXXX
Output that is being written, beside its target. One that a killed process left may be deleted.
.TP
.I .NAME.partial\-XXXXXX.old
The checkpoint that is being replaced, on a file system that cannot exchange two folders.
If NAME does not exist, a kill came between two renames: rename it to NAME.
Otherwise it is the rest of the old checkpoint.
.TP
.I .NAME.partial\-pieces
What the parts of
.B \-\-part
wrote. The last part publishes it as NAME.
.TP
.I .NAME.partial\-remove
The same folder while it is removed. A later run with
.B \-\-part
removes what a kill left of it.
.TP
.I .NAME.partial\-saving
A save of lowbit.checkpoint.Writer. The next save to NAME removes what a killed save left,
and renames
.I .NAME.partial\-saving.old
back to NAME if a kill came between two renames.
)";

std::string man(const CLI::App& app) {
  const Outline all = outline(app);
  std::string out =
      ".TH LOWBIT\\-CKPT 1 \"\" \"lowbit " LOWBIT_VERSION
      "\" \"User Commands\"\n.SH NAME\nlowbit\\-ckpt \\- inspect, verify, convert, reshard and "
      "compare checkpoints of PyTorch optimizers\n.SH SYNOPSIS\n.nf\n";
  for (const Outline& command : all.commands) out += synopsis(command);
  out += ".fi\n.SH DESCRIPTION\n.B lowbit\\-ckpt\n";
  out += kDescription;
  out += ".SH OPTIONS\n";
  for (const OutlineOption& o : all.options) out += entry(o, false);
  out += ".SH COMMANDS\n";
  for (const Outline& command : all.commands) {
    out += ".SS " + command.name + "\n" + roff(command.about) + ".\n";
    for (const OutlineOption& o : command.places) out += entry(o, true);
    for (const OutlineOption& o : command.options) out += entry(o, false);
  }
  out += ".SH EXIT STATUS\n" + std::string(kExits) + ".SH EXAMPLES\n";
  for (const Example& e : examples(app)) {
    out +=
        fmt::format(".TP\n{}\n.nf\n\\fBlowbit\\-ckpt {}\\fR\n.fi\n", roff(e.about), roff(e.line));
  }
  return out + ".SH FILES\n" + kFiles;
}

}  // namespace

void add_man(CLI::App& app, std::function<Status()>& chosen) {
  CLI::App* command = app.add_subcommand("man", "Print the manual page, as roff");
  command->group("");
  command->callback([&app, &chosen] {
    chosen = [&app] {
      fmt::print("{}", man(app));
      return fine();
    };
  });
}

}  // namespace lowbit::ckpt
