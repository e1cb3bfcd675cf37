#include "command/inspect.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "command/progress.h"
#include "container/dcp.h"
#include "container/item.h"
#include "pipeline/reshard.h"
#include "pipeline/rows.h"

namespace lowbit::ckpt {
namespace {

using Json = nlohmann::ordered_json;

/// What a tensor is, by its name: the format is part of the name of lowbit's state
/// (docs/formats.md).
std::string kind_of(const std::string& name) {
  static const std::regex coded(
      "_((?:dynamic|linear|power1_|power2_)[2-8](?:_unsigned)?|float8_e[45]m[23](?:_unsigned)?|"
      "log8(?:_fixed|_signed)?|log16|companded8(?:_unsigned)?)"
      "(_scale(?:_row|_column|_tensor|_rank1_[0-9])?)?$");
  static const std::regex beside("\\.param_[a-z0-9_]+$");
  static const std::regex factored("\\.(?:exp_avg_sq|exp_avg_res|variance)_(?:row|col)$");
  static const std::regex wide(
      "\\.(?:exp_avg|exp_avg_sq|max_exp_avg_sq|exp_avg_slow|momentum_buffer|square_avg|grad_avg|"
      "sum|variance|update_norm|projection)(_bfloat16)?$");
  const size_t dot = name.rfind('.');
  const std::string leaf = dot == std::string::npos ? "." + name : name.substr(dot);
  if (leaf.size() > 100)
    return "weights and other tensors";  // regex recurses: a long name is no key
  std::smatch match;
  if (std::regex_search(leaf, match, coded))
    return (match[2].matched ? "scales, " : "codes, ") + match[1].str();
  if (std::regex_search(leaf, beside)) return "kept beside weights";
  if (std::regex_search(leaf, factored)) return "factored moments, float32";
  if (std::regex_search(leaf, match, wide))
    return match[1].matched ? "wide state, bfloat16" : "wide state, float32";
  if (leaf == ".step") return "step counters";
  if (leaf == ".stream") return "random streams";
  return "weights and other tensors";
}

Json value_of(const Pickle& p, NodeId id, int depth) {
  const Node& n = p[id];
  switch (n.kind) {
    case Kind::kNone:
      return nullptr;
    case Kind::kBool:
      return n.integer != 0;
    case Kind::kInt:
      return n.integer;
    case Kind::kFloat:
      return std::isfinite(n.real) ? Json(n.real) : Json(fmt::format("{}", n.real));
    case Kind::kString:
      return printable(n.text);
    case Kind::kList:
    case Kind::kTuple: {
      if (depth > 2 || n.items.size() > 64) return fmt::format("<{} items>", n.items.size());
      Json list = Json::array();
      for (const NodeId item : n.items) list.push_back(value_of(p, item, depth + 1));
      return list;
    }
    default:
      return "<not shown>";
  }
}

/// The value of a blob where it is plain data, else a note. Never an error: blobs are opaque.
Json blob_value(const Manifest& m, const Blob& blob) {
  if (blob.place.length > (1u << 20)) return "<large>";
  const auto value = read_value(*m.files.at(blob.place.file), blob.place, printable(blob.name));
  return value.ok() ? value_of(value.value(), value.value().root, 0) : Json("<not plain data>");
}

/// The number in a 0-D float32 tensor, to show a step.
Result<double> scalar(const Manifest& m, const Tensor& t) {
  RowReader reader(m);
  float f = 0;
  LB_CHECK(reader.read(t, 0, 1, reinterpret_cast<char*>(&f)));
  return static_cast<double>(f);
}

std::string size_text(uint64_t bytes) {
  if (bytes < 10000) return fmt::format("{} B", bytes);
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double n = static_cast<double>(bytes);
  int u = 0;
  for (; n >= 1024 && u < 4; ++u) n /= 1024;
  return fmt::format("{:.1f} {}", n, units[u]);
}

}  // namespace

Status inspect(const InspectOptions& options) {
  LB_TRY(m, read_dcp(options.path));
  Json out;
  out["path"] = options.path;
  out["container"] = "dcp";
  out["facts"] = m.facts;
  out["files"] = m.files.size();
  std::map<std::string, std::pair<uint64_t, uint64_t>> dtypes, kinds;  // tensors, bytes
  std::vector<double> steps;
  out["tensors"] = Json::array();
  for (const Tensor& t : m.tensors) {
    const uint64_t bytes = static_cast<uint64_t>(RowReader::rows(t)) * RowReader::row_bytes(t);
    const std::string kind = kind_of(t.name);
    out["tensors"].push_back({{"name", printable(t.name)},
                              {"shape", t.shape},
                              {"dtype", t.dtype->name},
                              {"chunks", t.chunks.size()},
                              {"bytes", bytes},
                              {"kind", kind}});
    for (auto* sum : {&dtypes[t.dtype->name], &kinds[kind]}) {
      ++sum->first;
      sum->second += bytes;
    }
    if (t.name.ends_with(".step") && t.shape.empty() && std::string(t.dtype->name) == "float32") {
      LB_TRY(step, scalar(m, t));
      if (std::find(steps.begin(), steps.end(), step) == steps.end()) steps.push_back(step);
    }
  }
  std::sort(steps.begin(), steps.end());
  out["steps"] = steps;
  out["values"] = Json::object();
  for (const Blob& b : m.blobs) out["values"][printable(b.name)] = blob_value(m, b);
  for (const auto& [key, sums] :
       {std::pair{"bytes_by_dtype", &dtypes}, std::pair{"bytes_by_kind", &kinds}}) {
    out[key] = Json::object();
    for (const auto& [name, sum] : *sums)
      out[key][name] = {{"tensors", sum.first}, {"bytes", sum.second}};
  }
  out["bytes"] = tensor_bytes(m);
  if (options.digest) {
    ProgressBar bar("digest", options.quiet);
    LB_TRY(hex, digest(m, bar.function()));
    out["digest"] = hex;
  }
  if (options.json) {
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
    return fine();
  }

  fmt::print("{}\n  torch.distributed.checkpoint, {} files, {} tensors, {} values, {}\n",
             printable(options.path), m.files.size(), m.tensors.size(), m.blobs.size(),
             size_text(tensor_bytes(m)));
  for (const std::string& fact : m.facts) fmt::print("  {}\n", fact);
  for (const double step : steps) fmt::print("  step {:.0f}\n", step);
  size_t width = 4;
  for (const Tensor& t : m.tensors) width = std::max(width, printable(t.name).size());
  fmt::print("\n{:<{}}  {:<10} {:>16} {:>7} {:>12}\n", "name", width, "dtype", "shape", "chunks",
             "bytes");
  for (const Json& t : out["tensors"]) {
    fmt::print("{:<{}}  {:<10} {:>16} {:>7} {:>12}\n", t["name"].get<std::string>(), width,
               t["dtype"].get<std::string>(), shape_text(t["shape"].get<Shape>()),
               t["chunks"].get<size_t>(), t["bytes"].get<uint64_t>());
  }
  if (!m.blobs.empty()) fmt::print("\n");
  for (const auto& [name, value] : out["values"].items()) {
    std::string shown = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (shown.size() > 100) shown = shown.substr(0, 97) + "...";
    fmt::print("{} = {}\n", name, shown);
  }
  fmt::print("\n");
  for (const auto* sums : {&dtypes, &kinds}) {
    for (const auto& [name, sum] : *sums)
      fmt::print("{:<32} {:>6} tensors {:>12}\n", name, sum.first, size_text(sum.second));
  }
  if (options.digest) fmt::print("digest {}\n", out["digest"].get<std::string>());
  return fine();
}

}  // namespace lowbit::ckpt
