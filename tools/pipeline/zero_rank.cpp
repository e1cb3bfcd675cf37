#include "pipeline/zero_rank.h"

#include <set>
#include <string_view>

#include "container/common/open.h"
#include "container/pickled/unread_tensor.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The first part of `name` that ends before ".key", whatever follows; npos where there is none.
size_t before_key(std::string_view name, std::string_view key) {
  for (size_t at = name.find(key); at != std::string_view::npos; at = name.find(key, at + 1)) {
    const size_t end = at + key.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return at;
  }
  return std::string_view::npos;
}

/// What the dicts are called that have an entry of that key.
std::set<std::string> dicts_with(const Document& document, std::string_view key) {
  std::set<std::string> out;
  for (const Leaf& leaf : document.leaves) {
    const std::string name = leaf.name();
    const size_t at = before_key(name, key);
    if (at != std::string_view::npos) out.insert(name.substr(0, at));
  }
  return out;
}

}  // namespace

Status check_no_zero_rank(const Document& document, const std::string& source) {
  // All stages write partition_count; stages 1 and 2 and bfloat16's optimizer have the first of the
  // others, stage 3 the second (DeepSpeed 0.19.8).
  const std::set<std::string> counted = dicts_with(document, "partition_count");
  if (counted.empty()) return fine();
  for (const char* key : {"single_partition_of_fp32_groups", "fp32_flat_groups", "zero_stage"}) {
    for (const std::string& dict : dicts_with(document, key)) {
      if (!counted.contains(dict)) continue;
      return bad((source.empty() ? "" : printable(source) + ": ") +
                 "has one rank's slices of flat vectors, of a ZeRO checkpoint of DeepSpeed: no "
                 "parameter's state is whole in it; give the folder that has all ranks' files");
    }
  }
  return fine();
}

Status check_no_rank_part(const Document& document, const std::string& source) {
  for (const Leaf& leaf : document.leaves) {
    const bool unread = leaf.value.is_unread_tensor() && leaf.value.text.starts_with(kOneRank);
    const bool part = leaf.stored != nullptr && !leaf.stored->one_rank.empty();
    if (!unread && !part) continue;
    return bad(
        (source.empty() ? "" : printable(source) + ": ") + printable(leaf.name()) + ": is " +
        (part ? "one rank's part, " + leaf.stored->one_rank : printable(leaf.value.text)) +
        "; the other ranks' are in other files. Save with dcp.save, to which each rank gives "
        "its part, or gather it with full_tensor(); where files of all ranks lie in a "
        "folder, merge them with the program that wrote them" +
        (source.empty() ? "" : ". --exclude leaves it out"));
  }
  return fine();
}

Result<std::shared_ptr<const Document>> open_weights(const std::string& path) {
  if (path.empty()) return std::shared_ptr<const Document>();
  ASSIGN_OR_RETURN(document, open_checkpoint(path));
  RETURN_IF_ERROR(check_no_rank_part(document, path));
  return std::make_shared<const Document>(std::move(document));
}

}  // namespace lowbit::ckpt
