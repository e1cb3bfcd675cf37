#include <algorithm>

#include "container/common/open.h"
#include "container/document/subclass_cut.h"
#include "dialect/flashoptim/flashoptim.h"
#include "dialect/megatron_view/megatron.h"
#include "dialect/torchao/leaf.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/part.h"
#include "pipeline/select.h"
#include "pipeline/zero_rank.h"

namespace lowbit::ckpt {

namespace {

/// An error if a dimension of the mesh shards a tensor dimension that no tensor has.
Status check_mesh(const Document& document, const Mesh& mesh) {
  size_t limit = 0;
  for (const Leaf& leaf : document.leaves) limit = std::max(limit, leaf.shape.size());
  for (size_t i = 0; i < mesh.dims.size(); ++i) {
    if (mesh.parts[i] > 1 && static_cast<size_t>(mesh.dims[i]) >= limit && limit > 0)
      return usage("nothing would be cut along tensor dimension " + std::to_string(mesh.dims[i]) +
                   ": no tensor has more than " + std::to_string(limit) +
                   " dimensions, which count from 0");
  }
  return fine();
}

/// reshard writes a folder, and a name that ends like a file's asks for something else.
Status check_folder_name(const std::string& target) {
  for (const char* end : {".pt", ".pth", ".bin", ".safetensors"}) {
    if (target.ends_with(end))
      return usage(printable(target) +
                   " is the name of a file, and reshard writes a folder: take " +
                   "another name, or convert for a file");
  }
  return fine();
}

}  // namespace

Result<Json> reshard(const std::string& source, const std::string& target,
                     const ReshardOptions& options) {
  RETURN_IF_ERROR(check_folder_name(target));
  ASSIGN_OR_RETURN(whole, open_checkpoint(source));
  RETURN_IF_ERROR(check_no_zero_rank(whole, source));
  RETURN_IF_ERROR(check_selection(whole, options.select));
  std::vector<std::string> warnings = whole.manifest->warnings;
  Document document = select_to_write(std::move(whole), options.select, warnings);
  RETURN_IF_ERROR(check_common_kept(document, source, ContainerKind::kDcp, warnings));
  RETURN_IF_ERROR(check_no_rank_part(document, source));
  RETURN_IF_ERROR(check_no_opaque_state(document, false, ContainerKind::kDcp));
  RETURN_IF_ERROR(check_blocks_kept(document));
  append(warnings, warn_of_left_behind(*document.manifest));
  append(warnings, warn_of_top_level(document));
  ASSIGN_OR_RETURN(left_out, leave_out_opaque(document, ContainerKind::kDcp));
  append(warnings, left_out);
  if (document.leaves.empty()) return usage("nothing of " + printable(source) + " is selected");
  RETURN_IF_ERROR(check_mesh(document, options.write.mesh));
  for (Leaf& leaf : document.leaves) {
    if (!options.requantize || !is_subclass(leaf)) continue;
    ASSIGN_OR_RETURN(recut, torchao_recut(document, leaf));
    leaf.recut = std::move(recut);
  }
  if (options.write.part) RETURN_IF_ERROR(check_part(options.write));
  // Other parts write to the same folder, which is not a leftover then.
  if (!options.write.part) append(warnings, warn_of_leftovers(target));
  if (options.write.replace) append(warnings, warn_of_others(target));
  if (options.dry_run)
    RETURN_IF_ERROR(check_target(ContainerKind::kDcp, document, target, options.write));
  ASSIGN_OR_RETURN(report, options.dry_run ? plan_dcp(document, options.write)
                                           : write_dcp(document, target, options.write));
  if (report.unchecked > 0)
    warnings.push_back(std::to_string(report.unchecked) +
                       " records of the source have no checksums: whether they are damaged cannot "
                       "be told");
  if (report.requantized > 0)
    warnings.push_back(std::to_string(report.requantized) +
                       " chunks were requantized, because a cut falls inside their blocks");
  Json out{{"source", printable(source)},
           {"target", printable(target)},
           {"dry_run", options.dry_run},
           {"ranks", options.write.mesh.ranks()},
           {"mesh", options.write.mesh.parts},
           {"dims", options.write.mesh.dims},
           {"tensors", report.tensors},
           {"recut", report.recut},
           {"requantized", report.requantized},
           {"values", report.values},
           {"chunks", report.chunks},
           {"copied", report.copied},
           {"bytes", report.bytes},
           {"unchecked", report.unchecked},
           {"warnings", warnings}};
  if (options.write.part) say_part(report, options.write, options.dry_run, out);
  return out;
}

}  // namespace lowbit::ckpt
