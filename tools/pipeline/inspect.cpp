#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "container/open.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/role.h"

namespace lowbit::ckpt {
namespace {

/// A value to show; what cannot be JSON is text.
Json shown(const Value& v, int depth) {
  switch (v.kind) {
    case Value::Kind::kNone:
      return nullptr;
    case Value::Kind::kBool:
      return v.integer != 0;
    case Value::Kind::kInt:
      return v.integer;
    case Value::Kind::kFloat:
      return std::isfinite(v.real) ? Json(v.real) : Json(fmt::format("{}", v.real));
    case Value::Kind::kText:
    case Value::Kind::kGlobal:
    case Value::Kind::kDevice:
      return printable(v.text);
    case Value::Kind::kBytes:
      return fmt::format("<{} bytes>", v.text.size());
    case Value::Kind::kDict:
    case Value::Kind::kOrdered: {
      if (depth > 4 || v.items.size() > 256) return fmt::format("<{} entries>", v.items.size() / 2);
      Json dict = Json::object();
      for (size_t i = 0; i + 1 < v.items.size(); i += 2) {
        const Json key = shown(v.items[i], depth + 1);
        dict[key.is_string() ? key.get<std::string>() : key.dump()] =
            shown(v.items[i + 1], depth + 1);
      }
      return dict;
    }
    default: {
      if (depth > 4 || v.items.size() > 256) return fmt::format("<{} items>", v.items.size());
      Json list = Json::array();
      for (const Value& item : v.items) list.push_back(shown(item, depth + 1));
      return list;
    }
  }
}

}  // namespace

Result<Json> inspect(const std::string& path, const InspectOptions& options) {
  LB_TRY(document, open_checkpoint(path));
  const Manifest& m = *document.manifest;
  Json out;
  out["path"] = printable(path);
  out["container"] = container_name(m.kind);
  out["facts"] = m.facts;
  out["warnings"] = m.warnings;
  out["files"] = m.file_names.size();
  std::map<std::string, std::pair<uint64_t, uint64_t>> dtypes, kinds;  // tensors, bytes
  std::vector<double> steps;
  out["tensors"] = Json::array();
  out["values"] = Json::object();
  uint64_t all = 0;
  for (const Leaf& leaf : document.leaves) {
    const std::string name = leaf.name();
    if (leaf.kind != Leaf::Kind::kTensor) {
      out["values"][printable(name)] =
          leaf.kind == Leaf::Kind::kValue ? shown(leaf.value, 0) : Json("<not plain data>");
      continue;
    }
    const std::string kind = kind_of(name);
    out["tensors"].push_back({{"name", printable(name)},
                              {"shape", leaf.shape},
                              {"dtype", leaf.dtype->name},
                              {"chunks", leaf.stored->chunks.size()},
                              {"bytes", leaf.bytes()},
                              {"kind", kind}});
    all += leaf.bytes();
    for (auto* sum : {&dtypes[leaf.dtype->name], &kinds[kind]}) {
      ++sum->first;
      sum->second += leaf.bytes();
    }
    if (name.ends_with(".step") && leaf.shape.empty() &&
        leaf.dtype->name == std::string("float32")) {
      float step = 0;
      LB_CHECK(leaf.source->read(0, 1, &step));
      if (std::find(steps.begin(), steps.end(), step) == steps.end()) steps.push_back(step);
    }
  }
  std::sort(steps.begin(), steps.end());
  out["steps"] = steps;
  for (const auto& [key, sums] :
       {std::pair{"bytes_by_dtype", &dtypes}, std::pair{"bytes_by_kind", &kinds}}) {
    out[key] = Json::object();
    for (const auto& [name, sum] : *sums)
      out[key][name] = {{"tensors", sum.first}, {"bytes", sum.second}};
  }
  out["bytes"] = all;
  if (options.digest) {
    LB_TRY(hex, digest(document, options.progress));
    out["digest"] = hex;
  }
  return out;
}

}  // namespace lowbit::ckpt
