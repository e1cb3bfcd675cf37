#include <algorithm>

#include "container/common/json_value.h"
#include "container/safetensors/safetensors.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<uint64_t> natural(const Value& v, const std::string& what) {
  if (!v.is(Value::Kind::kInt) || v.integer < 0)
    return bad(what + ": has a size or place that is not a natural number");
  return static_cast<uint64_t>(v.integer);
}

Result<SafetensorsEntry> entry(const std::string& name, const Value& given, uint64_t room,
                               SafetensorsHeader& header, const std::string& file) {
  const std::string what = file + ": " + printable(name);
  const Value *type = given.find("dtype"), *shape = given.find("shape"),
              *place = given.find("data_offsets");
  if (type == nullptr || !type->is(Value::Kind::kText) || shape == nullptr ||
      !shape->is(Value::Kind::kList) || place == nullptr || !place->is(Value::Kind::kList) ||
      place->items.size() != 2) {
    return bad(what + ": has no dtype, shape, or pair of data_offsets");
  }
  if (given.items.size() > 6) header.warnings.push_back(printable(name) + ": has unknown fields");
  const SafetensorsDtype* dtype = find_safetensors(type->text);
  if (dtype == nullptr) return bad(what + ": has the unknown dtype " + printable(type->text));
  if (dtype->dtype == nullptr)
    return bad(what + ": has the dtype " + dtype->name + ", which torch does not have");
  SafetensorsEntry out;
  out.name = name;
  out.dtype = dtype->dtype;
  for (const Value& size : shape->items) {
    ASSIGN_OR_RETURN(n, natural(size, what));
    out.shape.push_back(static_cast<int64_t>(n));
  }
  if (out.shape.size() > 64) return bad(what + ": has more than 64 dimensions");
  ASSIGN_OR_RETURN(count, elements(out.shape, what));
  if (dtype->bits == 4) {  // two numbers in each of torch's elements
    if (out.shape.empty() || out.shape.back() % 2 != 0)
      return bad(what + ": its last size is odd, so its values do not end with a byte");
    out.shape.back() /= 2;
    count /= 2;
  }
  ASSIGN_OR_RETURN(begin, natural(place->items[0], what));
  ASSIGN_OR_RETURN(end, natural(place->items[1], what));
  const std::string lies = what + ": lies at [" + std::to_string(begin) + ", " +
                           std::to_string(end) + "] of " + std::to_string(room) + " bytes";
  if (begin > end) return bad(lies);
  if (end > room) return damaged(lies + "; the file is cut off");
  if (end - begin != count * static_cast<uint64_t>(out.dtype->bytes))
    return bad(what + ": has " + std::to_string(end - begin) + " bytes, its shape " +
               shape_text(out.shape) + " of " + out.dtype->name + " wants " +
               std::to_string(count * static_cast<uint64_t>(out.dtype->bytes)));
  out.begin = begin;
  out.end = end;
  return out;
}

}  // namespace

const SafetensorsDtype* find_safetensors(std::string_view name) {
  static const std::vector<SafetensorsDtype> all = [] {
    std::vector<SafetensorsDtype> v = {
        {"BOOL", find_dtype("bool"), 8, 0},
        {"F4", find_dtype("float4_e2m1fn_x2"), 4, 0},
        {"F6_E2M3", nullptr, 6, 0},
        {"F6_E3M2", nullptr, 6, 0},
        {"U8", find_dtype("uint8"), 8, 0},
        {"I8", find_dtype("int8"), 8, 0},
        {"F8_E5M2", find_dtype("float8_e5m2"), 8, 0},
        {"F8_E4M3", find_dtype("float8_e4m3fn"), 8, 0},
        {"F8_E8M0", find_dtype("float8_e8m0fnu"), 8, 0},
        {"F8_E4M3FNUZ", find_dtype("float8_e4m3fnuz"), 8, 0},
        {"F8_E5M2FNUZ", find_dtype("float8_e5m2fnuz"), 8, 0},
        {"I16", find_dtype("int16"), 16, 0},
        {"U16", find_dtype("uint16"), 16, 0},
        {"F16", find_dtype("float16"), 16, 0},
        {"BF16", find_dtype("bfloat16"), 16, 0},
        {"I32", find_dtype("int32"), 32, 0},
        {"U32", find_dtype("uint32"), 32, 0},
        {"F32", find_dtype("float32"), 32, 0},
        {"C64", find_dtype("complex64"), 64, 0},
        {"F64", find_dtype("float64"), 64, 0},
        {"I64", find_dtype("int64"), 64, 0},
        {"U64", find_dtype("uint64"), 64, 0},
    };
    for (size_t i = 0; i < v.size(); ++i) v[i].rank = static_cast<int>(i);
    return v;
  }();
  const auto found =
      std::ranges::find_if(all, [&](const SafetensorsDtype& d) { return name == d.name; });
  return found == all.end() ? nullptr : &*found;
}

const SafetensorsDtype* find_safetensors(const Dtype& dtype) {
  for (const char* name :
       {"BOOL",        "F4",          "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0",
        "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16",     "BF16",    "I32",
        "U32",         "F32",         "C64", "F64", "I64",     "U64"}) {
    const SafetensorsDtype* d = find_safetensors(name);
    if (d->dtype == &dtype) return d;
  }
  return nullptr;
}

Result<SafetensorsHeader> parse_safetensors(std::string_view json, uint64_t room,
                                            const std::string& what) {
  ASSIGN_OR_RETURN(root, parse_json(json, kMaxValues, what + ": header"));
  if (!root.is_dict()) return bad(what + ": its header is not a JSON object");
  SafetensorsHeader out;
  if (json[0] != '{') out.warnings.push_back("the header begins with a space");
  if (json.size() % 8 != 0)
    out.warnings.push_back("the header's length is not a multiple of 8: tensors are not aligned");
  for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
    const std::string& name = root.items[i].text;
    const Value& given = root.items[i + 1];
    if (!given.is_dict()) return bad(what + ": " + printable(name) + ": is not a JSON object");
    if (name == "__metadata__") {
      for (size_t k = 0; k + 1 < given.items.size(); k += 2) {
        if (!given.items[k + 1].is(Value::Kind::kText))
          return bad(what + ": __metadata__: " + printable(given.items[k].text) + " is not text");
        if (given.items[k].text == "DCP_SHARDING_INFO")
          out.warnings.push_back(
              "is one rank's file of a sharded save by torch's HuggingFace writer (DCP): other "
              "files "
              "hold the rest");
        out.metadata.emplace_back(given.items[k].text, given.items[k + 1].text);
      }
      continue;
    }
    if (name.empty()) out.warnings.push_back("a tensor has an empty name");
    const bool control = std::ranges::any_of(
        name, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
    if (control || name.size() > 1024 || name.find("..") != std::string::npos)
      out.warnings.push_back("a tensor has the unusual name " + printable(name));
    ASSIGN_OR_RETURN(parsed, entry(name, given, room, out, what));
    if (parsed.begin % static_cast<uint64_t>(parsed.dtype->bytes) != 0)
      out.warnings.push_back(printable(name) + ": is not aligned to its dtype");
    out.entries.push_back(std::move(parsed));
  }
  std::ranges::stable_sort(out.entries, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t at = 0;
  for (const SafetensorsEntry& e : out.entries) {
    if (e.begin != at)
      return bad(what + ": " + printable(e.name) +
                 (e.begin < at ? " overlaps another tensor" : " leaves a hole before it"));
    at = e.end;
  }
  if (at != room)
    return bad(what + ": has " + std::to_string(room - at) + " bytes behind its last tensor");
  return out;
}

Result<std::string> safetensors_header(
    const std::vector<SafetensorsEntry>& entries,
    const std::vector<std::pair<std::string, std::string>>& metadata, const std::string& what) {
  Value root{.kind = Value::Kind::kDict};
  const auto put = [](Value& dict, const std::string& key, Value value) {
    dict.items.push_back(Value::words(key));
    dict.items.push_back(std::move(value));
  };
  Value texts{.kind = Value::Kind::kDict};
  for (const auto& [key, text] : metadata) put(texts, key, Value::words(text));
  if (!metadata.empty()) put(root, "__metadata__", std::move(texts));
  for (const SafetensorsEntry& e : entries) {
    const SafetensorsDtype* dtype = find_safetensors(*e.dtype);
    Value shape = Value::list({});
    for (size_t i = 0; i < e.shape.size(); ++i) {
      const bool doubled = dtype->bits == 4 && i + 1 == e.shape.size();
      shape.items.push_back(Value::number(e.shape[i] * (doubled ? 2 : 1)));
    }
    Value entry{.kind = Value::Kind::kDict};
    put(entry, "dtype", Value::words(dtype->name));
    put(entry, "shape", std::move(shape));
    put(entry, "data_offsets",
        Value::list({Value::number(static_cast<int64_t>(e.begin)),
                     Value::number(static_cast<int64_t>(e.end))}));
    put(root, e.name, std::move(entry));
  }
  ASSIGN_OR_RETURN(json, json_text(root, kMaxValues, what + ": header"));
  return json + std::string((8 - json.size() % 8) % 8, ' ');
}

}  // namespace lowbit::ckpt
