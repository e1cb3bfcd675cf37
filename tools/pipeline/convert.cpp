// From one dialect and container to another: the source is read as values and codes, the target
// asks for them piece by piece.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "container/common/open.h"
#include "container/document/subclass_cut.h"
#include "dialect/common/dialect.h"
#include "dialect/common/rounding.h"
#include "dialect/common/settings_kept.h"
#include "dialect/deepspeed/universal.h"
#include "dialect/flashoptim/flashoptim.h"
#include "dialect/megatron_view/megatron.h"
#include "dialect/model/parameter_names.h"
#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/floats.h"
#include "dialect/requantize/master.h"
#include "dialect/tree/algorithm.h"
#include "dialect/tree/left_out.h"
#include "dialect/tree/model_order.h"
#include "dialect/tree/number_keys.h"
#include "io/suggest.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/part.h"
#include "pipeline/select.h"
#include "pipeline/zero_rank.h"

namespace lowbit::ckpt {
namespace {

/// What can be written.
constexpr ContainerKind kContainers[] = {ContainerKind::kDcp, ContainerKind::kTorch,
                                         ContainerKind::kSafetensors, ContainerKind::kUniversal};

Result<ContainerKind> container_of(const std::string& said, const std::string& target,
                                   ContainerKind source) {
  for (const ContainerKind kind : kContainers) {
    if (said == container_name(kind)) return kind;
  }
  if (!said.empty())
    return usage(fmt::format("--container must be {}, not {}", alternatives(container_names()),
                             printable(said)));
  for (const char* end : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (target.ends_with(end)) return ContainerKind::kTorch;
  }
  if (target.ends_with(".safetensors")) return ContainerKind::kSafetensors;
  if (source == ContainerKind::kLegacy) return ContainerKind::kTorch;
  // DeepSpeed's folders hold nothing but its own: a Universal one is written where it is asked for.
  const bool deepspeed = source == ContainerKind::kZero || source == ContainerKind::kUniversal;
  return deepspeed ? ContainerKind::kDcp : source;
}

/// As many ranks as the source was saved by.
int64_t ranks_of(const Manifest& manifest) {
  if (manifest.kind != ContainerKind::kDcp) return 1;
  std::set<std::string> ranks;
  for (const std::string& name : manifest.file_names) {
    if (!name.starts_with("__")) return 1;
    ranks.insert(name.substr(0, name.find('_', 2)));
  }
  return std::max<int64_t>(1, static_cast<int64_t>(ranks.size()));
}

Json states_of(const DialectReport& report, bool dry_run) {
  Json states = Json::array();
  for (const StateReport& s : report.states) {
    Json row{
        {"param", s.param}, {"state", s.state}, {"from", s.from}, {"to", s.to}, {"exact", s.exact}};
    if (!s.exact && !dry_run) {
      const RoundingError before = s.before == nullptr ? RoundingError{} : *s.before;
      row["max_error"] = error_number(std::max(s.max_error, before.limit));
      row["relative_error"] = error_number(std::max(s.relative_error, before.relative()));
    }
    states.push_back(std::move(row));
  }
  return states;
}

/// A pattern that matches no parameter is a typing mistake.
Status check_full_precision(const Model& model, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    const bool fits = std::ranges::any_of(
        model.params, [&](const Param& p) { return name_fits(p.name, {pattern}); });
    const bool named =
        std::ranges::any_of(model.params, [](const Param& p) { return !p.name.empty(); });
    if (!fits)
      return usage("--full-precision '" + printable(pattern) + "' matches no parameter" +
                   (named ? "" : ": they are numbered; --model PATH names those of one group"));
  }
  return fine();
}

/// Refuses a path that occurs twice: one leaf would replace the other.
Status check_paths(const Document& document) {
  std::set<std::string> names;
  for (const Leaf& leaf : document.leaves) {
    if (!names.insert(leaf.name()).second)
      return bad(printable(leaf.name()) + ": would be written twice");
  }
  return fine();
}

/// The dialect of this name, null where none is said.
Result<const Dialect*> dialect_named(const std::string& said) {
  const Dialect* found = said.empty() ? nullptr : find_dialect(said);
  if (said.empty() || found != nullptr) return found;
  return usage(fmt::format("no dialect is named {}; there are {}{}", printable(said),
                           fmt::join(dialect_names(), ", "), did_you_mean(said, dialect_names())));
}

/// Options that make no sense together.
Status check_options(const ConvertOptions& options, const Dialect* from, const Dialect* to) {
  if (to != nullptr && to->write == nullptr)
    return usage(fmt::format("{} can only be read; these can be written: {}", to->name,
                             fmt::join(written_dialect_names(), ", ")));
  if (options.wanted.keep && !options.weights.empty())
    return usage("--keep refuses to round, and --weights rounds; leave one of the two out");
  if (to != nullptr) return fine();
  if (!options.wanted.state_format.empty() || options.wanted.block != 0 ||
      !options.wanted.full_precision.empty())
    return usage(
        "--state-format, --block and --full-precision say how the target of --to keeps its state");
  if (options.container == container_name(ContainerKind::kUniversal)) return fine();  // torch's
  if (!options.optimizer.empty())
    return usage("--optimizer says which optimizer --to converts; say to what");
  if (!options.model.empty() && options.weights.empty())
    return usage(
        "--model tells the parameters' shapes or names of the optimizer that --to converts; say to "
        "what");
  if (!options.members.empty())
    return usage(
        "--group says what is in the groups of the optimizer that --to converts; say to what");
  if (from != nullptr || options.wanted.lossy)
    return usage("--from and --lossy are about the way to another optimizer; say which with --to");
  return fine();
}

/// A conversion in progress.
struct Conversion {
  std::string source;
  const Dialect *from = nullptr, *to = nullptr;  // null: to be found out; the source's own
  std::shared_ptr<Document> document;
  Model model;  // sources of `out` may refer to it
  Document out;
  DialectReport changes;
  std::vector<std::string> warnings;
};

/// By parameter and state.
using RoundingErrors =
    std::map<std::pair<std::string, std::string>, std::shared_ptr<RoundingError>>;

/// Measures what float32 makes of states that are float64.
RoundingErrors measure_float64(Model& model) {
  RoundingErrors out;
  for (Param& p : model.params) {
    for (State& s : p.states) {
      if (!is_float64(s)) continue;
      const auto error = std::make_shared<RoundingError>();
      s.values = rounded_floats(*s.leaves[0], error);
      out.emplace(std::pair(shown(p), s.name), error);
    }
  }
  return out;
}

/// Float64 that the target has as anything else was rounded, which --keep refuses.
Status note_rounding(const RoundingErrors& errors, const Wanted& wanted, DialectReport& changes) {
  for (StateReport& s : changes.states) {
    const auto error = errors.find({s.param, s.state});
    if (error == errors.end() || s.to == "float64") continue;
    if (wanted.keep)
      return mismatch(s.param + ": " + s.state + " (float64) would be rounded to " + s.to +
                      "; leave --keep out, or take --to torch, which keeps float64");
    s.exact = false;
    s.before = error->second;
  }
  return fine();
}

/// The optimizer's state, as the target has it.
Status translate(Conversion& at, const Wanted& wanted) {
  OptimizerTree tree;
  if (at.from == nullptr) {
    auto found = recognize(*at.document);
    if (!found.ok()) return found.error().after(printable(at.source) + ": ");
    at.from = found.value().dialect;
    tree = std::move(found.value().tree);
  } else {
    ASSIGN_OR_RETURN(made, optimizer_tree_of(*at.document));
    tree = std::move(made);
  }
  ASSIGN_OR_RETURN(read, at.from->read(at.document, tree));
  at.model = std::move(read);
  if (const Status read_some = check_any_read(tree, at.model); !read_some.ok())
    return read_some.error().after(printable(at.source) + ": ");
  RETURN_IF_ERROR(check_order(at.model));
  RETURN_IF_ERROR(check_full_precision(at.model, wanted.full_precision));
  const bool stepped = std::ranges::any_of(
      at.model.params, [](const Param& p) { return !p.states.empty() || !p.numbers.empty(); });
  if (!stepped && at.model.algorithm.empty() && at.to->name != std::string_view("torch"))
    return bad(printable(at.source) +
               ": its optimizer was never stepped, so there is no state to convert: build the new "
               "optimizer and begin");
  if (!at.model.refusal.empty() && at.to != at.from)
    return bad(printable(at.source) + ": " + at.model.refusal);
  if (!at.model.only_for.empty() && at.model.only_for != at.to->name)
    return bad(printable(at.source) + ": its optimizer is " + at.from->name + "' " +
               at.model.algorithm + ", and of the optimizers here only that of " +
               at.model.only_for + " takes the same step: convert --to " + at.model.only_for);
  if (const Status kept = check_settings(at.model, *at.to, at.changes); !kept.ok())
    return kept.error().after(printable(at.source) + ": ");
  append(at.warnings, at.model.warnings);
  for (size_t g = 0; g < at.model.groups.size(); ++g) {
    for (const std::string& key : settings_without_value(at.model.algorithm, at.model.groups[g]))
      at.warnings.push_back("param_groups." + std::to_string(g) + "." + key +
                            ": is None, and stays so: give it a value before training continues");
  }
  for (const std::string& text : at.model.unresolved) {
    if (!wanted.lossy)
      return bad(printable(at.source) + ": " + text +
                 "; --lossy leaves it out, and settings are then defaults, 0 for weight decay");
    at.warnings.push_back(text + ": left out");
  }
  const RoundingErrors rounded = measure_float64(at.model);
  auto written = at.to->write(at.model, wanted, at.changes);
  if (!written.ok()) {
    const Error& error = written.error();
    const bool named =
        error.code != Exit::kBadInput || error.text.starts_with(printable(at.source));
    return named ? error : error.after(printable(at.source) + ": ");
  }
  Document made = std::move(written.value());
  append(at.warnings, state_left_out(tree, at.model, made));
  RETURN_IF_ERROR(note_rounding(rounded, wanted, at.changes));
  at.out = std::move(made);
  at.out.manifest = at.document->manifest;
  at.out.optimizer = at.document->optimizer;  // what comes after it is of the same one
  at.out.dicts = at.document->dicts;
  at.out.others = at.document->others;
  if (at.changes.states.empty() &&
      std::ranges::any_of(at.model.params, [](const Param& p) { return !p.states.empty(); }))
    return bad(std::string(at.to->name) + " keeps none of the states of " + printable(at.source));
  return check_paths(at.out);
}

/// Opens the source.
Status open_source(Conversion& at, const ConvertOptions& options) {
  const Selection& selection = options.select;
  ASSIGN_OR_RETURN(whole, open_checkpoint(at.source));
  RETURN_IF_ERROR(check_no_zero_rank(whole, at.source));
  if (at.to != nullptr) RETURN_IF_ERROR(check_megatron_rank(at.source, at.source));
  RETURN_IF_ERROR(check_selection(whole, selection));
  std::vector<std::string> left_out;
  at.document = std::make_shared<Document>(select_to_write(std::move(whole), selection, left_out));
  if (!options.optimizer.empty()) at.document->optimizer = options.optimizer;
  at.document->members = options.members;
  if (!options.members.empty() && !is_megatron(*at.document))
    return usage("--group says what Megatron-Core does not save, and " + printable(at.source) +
                 " has no optimizer of Megatron-Core");
  if (at.document->leaves.empty())
    return usage("nothing of " + printable(at.source) + " is selected");
  RETURN_IF_ERROR(check_no_rank_part(*at.document, at.source));
  at.warnings = at.document->manifest->warnings;
  append(at.warnings, left_out);
  append(at.warnings, warn_of_left_behind(*at.document->manifest));
  if (at.to != nullptr) leave_common_behind(*at.document);
  return fine();
}

/// What is written: the source's leaves, with the state and the weights that are asked for.
Status make_target(Conversion& at, const ConvertOptions& options) {
  ASSIGN_OR_RETURN(weights, open_weights(options.model));
  at.document->model = std::move(weights);
  // Those of Megatron-Core are in tensors of their own, which no target has.
  if (!options.weights.empty() || (at.to != nullptr && is_megatron(*at.document))) {
    auto full = with_masters(*at.document, at.changes);
    if (!full.ok() && full.error().code == Exit::kBadInput)
      return full.error().after(printable(at.source) + ": ");
    if (!full.ok()) return full.error();
    *at.document = std::move(full.value());
  }
  at.out = *at.document;
  Wanted wanted = options.wanted;
  wanted.weights = options.weights;
  if (at.to != nullptr) RETURN_IF_ERROR(translate(at, wanted));
  if (!options.weights.empty()) {
    ASSIGN_OR_RETURN(rounded,
                     with_weights(std::move(at.out), options.weights, options.seed, at.changes));
    at.out = std::move(rounded);
    at.out.manifest = at.document->manifest;
    RETURN_IF_ERROR(check_paths(at.out));
  }
  // Its weights are read too: the target must not replace it.
  if (at.document->model != nullptr) at.out.others.push_back(at.document->model->manifest);
  return fine();
}

/// A directory keeps every key as text, so what is written as a file gets the numbers back that an
/// optimizer looks for.
void restore_keys(Conversion& at, ContainerKind target) {
  if (target == ContainerKind::kDcp) return;
  const uint64_t changed = restore_number_keys(at.out);
  if (changed > 0 && at.document->manifest->kind != ContainerKind::kDcp)
    at.warnings.push_back(
        std::to_string(changed) +
        " parameters had their state under text, such as '0', where the optimizer looks for "
        "numbers, and would have loaded none: they are written as numbers");
}

/// What a user of the target must know: a directory of lowbit's state loads tensor by tensor.
Json notes_of(const Dialect* from, const Dialect* to, ContainerKind kind, const Wanted& wanted) {
  Json notes = Json::array();
  if (to == nullptr || to->name != std::string_view("lowbit") || kind != ContainerKind::kDcp)
    return notes;
  std::string same = "the same state_format";
  if (!wanted.full_precision.empty()) {
    std::vector<std::string> patterns;
    for (const std::string& p : wanted.full_precision) patterns.push_back("'" + printable(p) + "'");
    same += fmt::format(" and full_precision=[{}]", fmt::join(patterns, ", "));
  } else if (from == to) {  // which keeps what its groups say
    same += " and the same full_precision as the source";
  } else {
    same += " and no full_precision";
  }
  notes.push_back("plain dcp.load needs " + same +
                  "; lowbit.load_optimizer loads it into any optimizer");
  return notes;
}

/// What writing would report.
Result<WriteReport> plan(ContainerKind kind, const Document& out, const std::string& target,
                         const WriteOptions& options) {
  RETURN_IF_ERROR(check_target(kind, out, target, options));
  if (kind == ContainerKind::kDcp) return plan_dcp(out, options);
  WriteReport report;
  for (const Leaf& leaf : out.leaves) {
    const bool tensor = leaf.kind == Leaf::Kind::kTensor || is_subclass(leaf);
    (tensor ? report.tensors : report.values) += 1;
    ASSIGN_OR_RETURN(bytes, kept_bytes(out, leaf));
    report.bytes += bytes;
  }
  return report;
}

Result<WriteReport> write_universal(Conversion& at, const std::string& target,
                                    const WriteOptions& options, bool dry_run) {
  at.out.model = at.document->model;
  auto files = universal_files(at.out, at.warnings);
  if (!files.ok()) return files.error().after(printable(at.source) + ": ");
  RETURN_IF_ERROR(check_target(ContainerKind::kUniversal, at.out, target, options));
  return dry_run ? plan_files(files.value()) : write_files(files.value(), at.out, target, options);
}

/// Writes the target, or says what would be written.
Result<WriteReport> write_target(Conversion& at, ContainerKind kind, const std::string& target,
                                 const WriteOptions& options, bool dry_run) {
  if (kind == ContainerKind::kUniversal) return write_universal(at, target, options, dry_run);
  return dry_run ? plan(kind, at.out, target, options)
                 : write_container(kind, at.out, target, options);
}

Result<uint64_t> bytes_of(const Document& document) {
  uint64_t sum = 0;
  for (const Leaf& leaf : document.leaves) {
    ASSIGN_OR_RETURN(bytes, kept_bytes(document, leaf));
    sum += bytes;
  }
  return sum;
}

/// An error where the target is written by parts and cannot be.
Status check_parts(const ConvertOptions& options, const std::string& target, bool directory) {
  if (!options.write.part) return fine();
  if (!directory)
    return usage("--part is for directories of torch.distributed.checkpoint, and " +
                 printable(target) + " will not be one; leave it out, or take --container dcp");
  return check_part(options.write);
}

/// What says which values are written, where names, shapes and dtypes may be the same.
std::string part_plan(const ConvertOptions& options, const Dialect* from) {
  const Wanted& wanted = options.wanted;
  return Json{options.to,
              from == nullptr ? "" : from->name,
              wanted.state_format,
              wanted.block,
              wanted.keep,
              wanted.lossy,
              wanted.full_precision,
              options.weights,
              options.seed,
              options.optimizer,
              options.members}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::vector<std::string> dialect_names() {
  std::vector<std::string> out;
  for (const Dialect* d : dialects()) out.emplace_back(d->name);
  return out;
}

std::vector<std::string> written_dialect_names() {
  std::vector<std::string> out;
  for (const Dialect* d : dialects()) {
    if (d->write != nullptr) out.emplace_back(d->name);
  }
  return out;
}

std::vector<std::string> container_names() {
  std::vector<std::string> out;
  for (const ContainerKind kind : kContainers) out.emplace_back(container_name(kind));
  return out;
}

std::string alternatives(const std::vector<std::string>& words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i)
    out += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return out;
}

Result<Json> convert(const std::string& source, const std::string& target,
                     const ConvertOptions& options) {
  Conversion at;
  at.source = source;
  ASSIGN_OR_RETURN(to, dialect_named(options.to));
  ASSIGN_OR_RETURN(from, dialect_named(options.from));
  RETURN_IF_ERROR(check_options(options, from, to));
  at.from = from;
  at.to = to;
  if (options.container == container_name(ContainerKind::kUniversal)) {
    if (to != nullptr && to != find_dialect("torch"))
      return usage("a Universal Checkpoint holds torch's float32 state alone: leave --to out");
    at.to = to = find_dialect("torch");
  }
  RETURN_IF_ERROR(open_source(at, options));
  ASSIGN_OR_RETURN(kind, container_of(options.container, target, at.document->manifest->kind));
  const bool directory = kind == ContainerKind::kDcp;
  if (to == nullptr) RETURN_IF_ERROR(check_common_kept(*at.document, at.source, kind, at.warnings));
  RETURN_IF_ERROR(check_parts(options, target, directory));
  RETURN_IF_ERROR(check_no_opaque_state(*at.document, to != nullptr, kind));
  if (to == nullptr) RETURN_IF_ERROR(check_blocks_kept(*at.document));
  ASSIGN_OR_RETURN(left_out, leave_out_opaque(*at.document, kind));
  append(at.warnings, left_out);
  RETURN_IF_ERROR(make_target(at, options));
  restore_keys(at, kind);
  append(at.warnings, warn_of_texts(*at.document->manifest, kind));
  if (!options.write.mesh.parts.empty() && !directory)
    return usage("--world-size is for directories of torch.distributed.checkpoint, and " +
                 printable(target) + " will not be one; leave it out, or take --container dcp");
  if (directory) append(at.warnings, warn_of_top_level(*at.document));
  // Other parts write to the same folder, which is not a leftover then.
  if (!options.write.part) append(at.warnings, warn_of_leftovers(target));
  if (options.write.replace && directory) append(at.warnings, warn_of_others(target));
  WriteOptions write = options.write;
  write.part_plan = part_plan(options, at.from);
  if (write.mesh.parts.empty()) write.mesh = {{ranks_of(*at.document->manifest)}, {0}};
  ASSIGN_OR_RETURN(report, write_target(at, kind, target, write, options.dry_run));
  // The writing may stop it too: values are rounded as they are written.
  append(at.warnings, at.changes.warnings);
  ASSIGN_OR_RETURN(source_bytes, bytes_of(*at.document));
  Json out{{"source", printable(source)},
           {"target", printable(target)},
           {"dry_run", options.dry_run},
           {"from", to == nullptr ? "" : at.from->name},
           {"to", to == nullptr ? "" : to->name},
           {"container", container_name(kind)},
           {"ranks", directory ? write.mesh.ranks() : 1},
           {"states", states_of(at.changes, options.dry_run)},
           {"tensors", report.tensors},
           {"values", report.values},
           {"copied", report.copied},
           {"source_bytes", source_bytes},
           {"bytes", report.bytes},
           {"unchecked", report.unchecked},
           {"notes", notes_of(at.from, to, kind, options.wanted)},
           {"warnings", at.warnings}};
  if (write.part) say_part(report, write, options.dry_run, out);
  return out;
}

}  // namespace lowbit::ckpt
