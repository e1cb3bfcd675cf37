#include "container/deepspeed/file_names.h"

#include <charconv>
#include <string_view>

namespace lowbit::ckpt {
namespace {

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool take(std::string_view& text, uint64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number > UINT32_MAX) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

}  // namespace

std::optional<DeepSpeedFile> optimizer_file(const std::string& name) {
  DeepSpeedFile out;
  std::string_view rest = name;
  if (!take(rest, "bf16_")) take(rest, "fp16_");
  if (!take(rest, "zero_pp_rank_") || !take(rest, out.rank) || !take(rest, "_mp_rank_") ||
      !take(rest, out.parallel) || rest != "_optim_states.pt")
    return std::nullopt;
  return out;
}

std::optional<DeepSpeedFile> model_file(const std::string& name) {
  DeepSpeedFile out;
  std::string_view rest = name;
  out.per_rank = take(rest, "zero_pp_rank_");
  if (out.per_rank && (!take(rest, out.rank) || !take(rest, "_"))) return std::nullopt;
  if (!take(rest, "mp_rank_") || !take(rest, out.parallel) || rest != "_model_states.pt")
    return std::nullopt;
  return out;
}

}  // namespace lowbit::ckpt
