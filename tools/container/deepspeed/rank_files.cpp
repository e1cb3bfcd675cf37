#include "container/deepspeed/rank_files.h"

#include <algorithm>
#include <map>

#include "container/deepspeed/file_names.h"
#include "container/deepspeed/model_states.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr const char* kUniversal =
    "; let ds_to_universal of DeepSpeed make a Universal Checkpoint of it, which is read";
/// ds_to_universal leaves DeepSpeed's own experts (deepspeed.moe) out.
constexpr const char* kUniversalOfExperts =
    "; if AutoEP made them, let ds_to_universal of DeepSpeed make a Universal Checkpoint of it, "
    "which is read; those of deepspeed.moe it leaves out";

std::string no_file_of(const Parts& parts, uint64_t rank) {
  return parts.what() + ": the file of rank " + std::to_string(rank) +
         " is missing (zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt)";
}

Error missing(const Parts& parts, uint64_t rank, uint64_t found) {
  return bad(no_file_of(parts, rank) + "; there are those of " + std::to_string(found) + " ranks");
}

}  // namespace

Result<std::vector<std::string>> find_rank_files(const Parts& parts) {
  ASSIGN_OR_RETURN(names, parts.folder().list());
  std::map<uint64_t, std::string> found;
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (name.find("expert_") != std::string::npos && name.ends_with(".pt"))
      return bad(parts.what() + ": has experts' files (" + printable(name) +
                 "): mixture-of-experts layers under ZeRO are not read" + kUniversalOfExperts);
    if (name.starts_with("layer_") && name.ends_with(".pt"))
      return bad(parts.what() + ": has files of a pipeline's layers (" + printable(name) +
                 "), which are not read" + kUniversal);
    const auto optimizer = optimizer_file(name), model = model_file(name);
    if ((optimizer && optimizer->parallel > 0) || (model && model->parallel > 0))
      return bad(parts.what() + ": has files of several parts of the model (" + printable(name) +
                 "), as tensor parallelism and pipelines write them, which are "
                 "not read" +
                 kUniversal);
    if (!optimizer) continue;
    const auto [at, fresh] = found.emplace(optimizer->rank, name);
    if (!fresh)
      return bad(parts.what() + ": has two files of rank " + std::to_string(optimizer->rank) +
                 ", " + printable(at->second) + " and " + printable(name) +
                 ": remove those of the older save");
  }
  if (found.empty()) {
    const auto other = std::ranges::find_if(
        names, [](const std::string& name) { return name.ends_with("_optim_states.pt"); });
    return bad(no_file_of(parts, 0) + (other == names.end()
                                           ? ""
                                           : "; there is " + printable(*other) +
                                                 ": give files the names that DeepSpeed wrote"));
  }
  for (const auto& [rank, name] : found) {
    if (rank != files.size()) return missing(parts, files.size(), found.size());
    files.push_back(name);
  }
  return files;
}

Status check_rank_count(const PartFile& file, const Parts& parts, size_t files, const Path& base) {
  // Its state is a list of dicts without padding, not a dict by number.
  if (file.has_below(below(base, place(0))))
    return bad(file.what() +
               ": is of an elastic checkpoint, which is not read; save with elastic_checkpoint "
               "false");
  const Path at = {"optimizer_state_dict", "partition_count"};
  const Value* said = file.value(at);
  if (said == nullptr)
    return bad(file.what() +
               ": does not say how many ranks there were (partition_count), so it "
               "is not of ZeRO");
  std::vector<Value> counts = {*said};
  if (said->is(Value::Kind::kList)) counts = said->items;
  for (const Value& count : counts) {
    if (!count.is(Value::Kind::kInt) || count.integer < 1)
      return bad(file.what() + ": its partition_count is not a number of ranks");
    if (count.integer != counts[0].integer)
      return bad(file.what() +
                 ": its groups are cut for different numbers of ranks, as with "
                 "mixture-of-experts layers, which are not read" +
                 kUniversalOfExperts);
    const auto wanted = static_cast<uint64_t>(count.integer);
    if (wanted > files) return missing(parts, files, files);
    if (wanted < files)
      return bad(parts.what() + ": has files of " + std::to_string(files) + " ranks, and " +
                 file.what() + " is of " + std::to_string(wanted) +
                 ": remove those of the older save");
  }
  if (file.has_below({"optimizer_state_dict", "ds_zero_partition_groups"}))
    return bad(file.what() +
               ": its groups are cut for different ranks (AutoEP), which is not "
               "read" +
               std::string(kUniversal));
  return fine();
}

}  // namespace lowbit::ckpt
