// From one dialect and container to another: the source is read as values and codes, the target
// asks for them piece by piece.
#include <algorithm>
#include <cmath>
#include <set>

#include "container/open.h"
#include "container/subclass_cut.h"
#include "dialect/dialect.h"
#include "dialect/master.h"
#include "dialect/rounding.h"
#include "dialect/weights.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/select.h"

namespace lowbit::ckpt {
namespace {

Error usage(std::string text) { return {Exit::kUsage, std::move(text)}; }

Result<ContainerKind> container_of(const std::string& said, const std::string& target,
                                   ContainerKind source) {
  if (said == "dcp") return ContainerKind::kDcp;
  if (said == "torch") return ContainerKind::kTorch;
  if (said == "safetensors") return ContainerKind::kSafetensors;
  if (!said.empty())
    return usage("--container must be dcp, torch or safetensors, not " + printable(said));
  for (const char* end : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (target.ends_with(end)) return ContainerKind::kTorch;
  }
  if (target.ends_with(".safetensors")) return ContainerKind::kSafetensors;
  return source == ContainerKind::kLegacy ? ContainerKind::kTorch : source;
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

Json error_number(double x) { return std::isfinite(x) ? Json(x) : Json("infinite"); }

Json states_of(const DialectReport& report, bool dry_run) {
  Json states = Json::array();
  for (const StateReport& s : report.states) {
    Json row{
        {"param", s.param}, {"state", s.state}, {"from", s.from}, {"to", s.to}, {"exact", s.exact}};
    if (!s.exact && !dry_run) {
      row["max_error"] = error_number(s.max_error);
      row["relative_error"] = error_number(s.relative_error);
    }
    states.push_back(std::move(row));
  }
  return states;
}

/// A pattern that fits no parameter is a typing mistake.
Status check_wide(const Model& model, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    const bool fits = std::any_of(model.params.begin(), model.params.end(),
                                  [&](const Param& p) { return name_fits(p.name, {pattern}); });
    const bool named = std::any_of(model.params.begin(), model.params.end(),
                                   [](const Param& p) { return !p.name.empty(); });
    if (!fits)
      return usage("--wide '" + printable(pattern) + "' fits no parameter" +
                   (named ? "" : ": they are numbered in this checkpoint, and have no names"));
  }
  return fine();
}

/// A path twice would be one leaf over the other.
Status check_paths(const Document& document) {
  std::set<std::string> names;
  for (const Leaf& leaf : document.leaves) {
    if (!names.insert(leaf.name()).second)
      return bad(printable(leaf.name()) + ": would be written twice");
  }
  return fine();
}

}  // namespace

Result<Json> convert(const std::string& source, const std::string& target,
                     const ConvertOptions& options) {
  const Dialect* to = options.to.empty() ? nullptr : find_dialect(options.to);
  const Dialect* from = options.from.empty() ? nullptr : find_dialect(options.from);
  for (const auto& [said, found] : {std::pair{options.to, to}, std::pair{options.from, from}}) {
    if (said.empty() || found != nullptr) continue;
    std::string all;
    for (const Dialect* d : dialects()) all += (all.empty() ? "" : ", ") + std::string(d->name);
    return usage("no dialect is named " + printable(said) + "; there are " + all);
  }
  if (to != nullptr && to->write == nullptr)
    return usage(std::string(to->name) + " is read, but not written");
  const bool keeps_dialect = to == nullptr;
  if (keeps_dialect && (!options.wanted.state_format.empty() || options.wanted.block != 0 ||
                        !options.wanted.wide.empty()))
    return usage("--state-format, --block and --wide say how the target of --to keeps its state");
  if (keeps_dialect && (from != nullptr || options.wanted.lossy))
    return usage("--from and --lossy are about the way to another optimizer; say which with --to");
  LB_TRY(whole, open_checkpoint(source));
  LB_CHECK(check_selection(whole, options.select));
  auto document = std::make_shared<Document>(select(std::move(whole), options.select));
  if (document->leaves.empty()) return usage("nothing of " + printable(source) + " is selected");
  LB_TRY(kind, container_of(options.container, target, document->manifest->kind));
  std::vector<std::string> warnings = document->manifest->warnings;
  if (!options.model.empty()) {
    LB_TRY(model, open_checkpoint(options.model));
    document->model = std::make_shared<Document>(std::move(model));
  }
  DialectReport changes;
  if (!options.weights.empty()) {
    LB_TRY(full, with_masters(*document, changes));
    *document = std::move(full);
  }
  Document out = *document;
  std::string spoken;
  Model model;  // sources of `out` may refer to it
  if (!keeps_dialect) {
    if (from == nullptr) {
      const auto found = recognize(*document);
      if (!found.ok())
        return Error{found.error().code, printable(source) + ": " + found.error().text};
      from = found.value();
    }
    LB_TRY(read, from->read(document));
    model = std::move(read);
    LB_CHECK(check_wide(model, options.wanted.wide));
    warnings.insert(warnings.end(), model.warnings.begin(), model.warnings.end());
    LB_TRY(made, to->write(model, options.wanted, changes));
    out = std::move(made);
    out.manifest = document->manifest;
    out.holders = document->holders;
    if (changes.states.empty() && std::any_of(model.params.begin(), model.params.end(),
                                              [](const Param& p) { return !p.states.empty(); }))
      return bad(std::string(to->name) + " keeps none of the states of " + printable(source));
    spoken = from->name;
    LB_CHECK(check_paths(out));
  }
  if (!options.weights.empty()) {
    LB_TRY(rounded, with_weights(std::move(out), options.weights, options.seed, changes));
    out = std::move(rounded);
    out.manifest = document->manifest;
    LB_CHECK(check_paths(out));
  }
  // Its weights are read too: what is written must not take its place.
  if (document->model != nullptr) out.others.push_back(document->model->manifest);
  WriteOptions write = options.write;
  if (write.mesh.parts.empty()) write.mesh = {{ranks_of(*document->manifest)}, {0}};
  if (!options.write.mesh.parts.empty() && kind != ContainerKind::kDcp)
    return usage("--world-size is of directories, and " + printable(target) +
                 " is to be one file; leave it out, or take --container dcp");
  WriteReport report;
  if (options.dry_run) LB_CHECK(check_target(kind, out, target, write));
  if (!options.dry_run) {
    LB_TRY(written, write_container(kind, out, target, write));
    report = written;
  } else if (kind == ContainerKind::kDcp) {
    LB_TRY(plan, plan_dcp(out, write));
    report = plan;
  } else {
    for (const Leaf& leaf : out.leaves) {
      const bool tensor = leaf.kind == Leaf::Kind::kTensor || is_subclass(leaf);
      (tensor ? report.tensors : report.values) += 1;
      LB_TRY(bytes, kept_bytes(out, leaf));
      report.bytes += bytes;
    }
  }
  warnings.insert(warnings.end(), changes.warnings.begin(), changes.warnings.end());
  uint64_t source_bytes = 0;
  for (const Leaf& leaf : document->leaves) {
    LB_TRY(bytes, kept_bytes(*document, leaf));
    source_bytes += bytes;
  }
  return Json{{"source", printable(source)},
              {"target", printable(target)},
              {"dry_run", options.dry_run},
              {"from", spoken},
              {"to", to == nullptr ? "" : to->name},
              {"container", container_name(kind)},
              {"ranks", kind == ContainerKind::kDcp ? write.mesh.ranks() : 1},
              {"states", states_of(changes, options.dry_run)},
              {"tensors", report.tensors},
              {"values", report.values},
              {"copied", report.copied},
              {"source_bytes", source_bytes},
              {"bytes", report.bytes},
              {"unchecked", report.unchecked},
              {"warnings", warnings}};
}

}  // namespace lowbit::ckpt
