// One rank's files of Megatron's older format: iter_*/mp_rank_*/model_optim_rng.pt, with
// distrib_optim.pt beside it where the optimizer was distributed.
#include <algorithm>
#include <filesystem>

#include "dialect/megatron_view/megatron.h"
#include "io/read/file.h"
#include "io/read/open.h"
#include "io/read/store.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The folder that the last entry of a path lies in, and its name.
std::pair<std::string, std::string> split(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return {".", path};
  return {slash == 0 ? "/" : path.substr(0, slash), path.substr(slash + 1)};
}

/// The error for one way of spelling a path; it begins with `begin`.
Status check_path(const std::string& path, const std::string& begin) {
  const auto [folder, name] = split(path);
  if (name == "distrib_optim.pt")
    return bad(begin +
               "has flat buffers of Megatron's distributed optimizer, and where a parameter lies "
               "in them is not saved: load it with Megatron, and save it with --ckpt-format "
               "torch_dist --dist-ckpt-optim-fully-reshardable");
  if (name != "model_optim_rng.pt") return fine();
  const auto [ranks, rank] = split(folder);
  if (!rank.starts_with("mp_rank_")) return fine();
  if (is_file(ranks)) return fine();  // a zip, with it inside
  const auto around = open_folder(ranks);
  const auto listed = around.ok() ? around.value()->list() : around.error();
  if (!listed.ok())
    return bad(begin + "is one rank's file, and whether there are other ranks' cannot be seen (" +
               listed.error().text + "); copy it with its folders to where it can");
  const std::vector<std::string>& names = listed.value();
  const auto of_ranks =
      std::ranges::count_if(names, [](const std::string& n) { return n.starts_with("mp_rank_"); });
  if (of_ranks < 2) return fine();
  return bad(
      begin + "is the file of one of " + std::to_string(of_ranks) +
      " model-parallel ranks, so no split parameter is whole in it: load them with Megatron, "
      "and save with --ckpt-format torch_dist");
}

}  // namespace

Status check_megatron_rank(const std::string& path, const std::string& source) {
  const std::string begin = source.empty() ? "" : printable(source) + ": ";
  if (is_url(path)) return check_path(path, begin);
  // As it was given, from whatever folder; and where links lead.
  std::error_code none;
  const auto full = std::filesystem::absolute(path, none);
  RETURN_IF_ERROR(check_path(full.lexically_normal().string(), begin));
  return check_path(std::filesystem::weakly_canonical(full, none).string(), begin);
}

}  // namespace lowbit::ckpt
