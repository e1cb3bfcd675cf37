// A tree as one text (docs/definitions/ckpt-formats.md):
// {"version":1,"leaves":[...],"holders":[...]}.
#include <bit>
#include <charconv>
#include <cmath>

#include "container/common/json_value.h"
#include "container/safetensors/safetensors.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Value dict(std::initializer_list<std::pair<const char*, Value>> entries) {
  Value out{.kind = Value::Kind::kDict};
  for (const auto& [key, value] : entries) {
    out.items.push_back(Value::words(key));
    out.items.push_back(value);
  }
  return out;
}

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    out += "0123456789abcdef"[static_cast<uint8_t>(c) >> 4];
    out += "0123456789abcdef"[static_cast<uint8_t>(c) & 15];
  }
  return out;
}
Result<std::string> unhex(const std::string& text, const std::string& what) {
  std::string out;
  for (size_t i = 0; i < text.size(); i += 2) {
    unsigned byte = 0;
    const char* end = text.data() + i + 2;
    if (i + 2 > text.size() || std::from_chars(text.data() + i, end, byte, 16).ptr != end)
      return bad(what + ": has bytes that are not in hexadecimal");
    out += static_cast<char>(byte);
  }
  return out;
}

std::string float_text(double x) {
  char text[64];
  if (std::isnan(x))  // a NaN has bits of its own
    return "nan:" +
           std::string(text,
                       std::to_chars(text, text + sizeof text, std::bit_cast<uint64_t>(x), 16).ptr);
  return std::string(text, std::to_chars(text, text + sizeof text, x).ptr);
}
Result<double> float_of(const std::string& text, const std::string& what) {
  const char* end = text.data() + text.size();
  if (text.starts_with("nan:")) {
    uint64_t bits = 0;
    if (std::from_chars(text.data() + 4, end, bits, 16).ptr == end &&
        std::isnan(std::bit_cast<double>(bits)))
      return std::bit_cast<double>(bits);
  } else {
    double x = 0;
    const auto [stop, error] = std::from_chars(text.data(), end, x);
    if (stop == end && error == std::errc()) return x;
  }
  return bad(what + ": has the number " + printable(text) + ", which is none");
}

/// A value with its type: what JSON has is itself, anything else an object of one key.
Value typed(const Value& v) {
  const auto list = [&v] {
    Value out = Value::list({});
    for (const Value& item : v.items) out.items.push_back(typed(item));
    return out;
  };
  const auto pairs = [&v] {
    Value out = Value::list({});
    for (size_t i = 0; i + 1 < v.items.size(); i += 2)
      out.items.push_back(Value::list({typed(v.items[i]), typed(v.items[i + 1])}));
    return out;
  };
  switch (v.kind) {
    case Value::Kind::kFloat:
      return dict({{"float", Value::words(float_text(v.real))}});
    case Value::Kind::kText:
      if (is_utf8(v.text, false)) return v;
      return dict({{"text", Value::words(hex(v.text))}});
    case Value::Kind::kBytes:
      return dict({{"bytes", Value::words(hex(v.text))}});
    case Value::Kind::kList:
      return list();
    case Value::Kind::kTuple:
      return dict({{"tuple", list()}});
    case Value::Kind::kSize:
      return dict({{"size", list()}});
    case Value::Kind::kSet:
      return dict({{"set", list()}});
    case Value::Kind::kComplex:
      return dict({{"complex", list()}});
    case Value::Kind::kBytearray:
      return dict({{"bytearray", Value::words(hex(v.text))}});
    case Value::Kind::kLong:
      return dict({{"long", Value::words(hex(v.text))}});
    case Value::Kind::kDict:
      return dict({{v.text == Value::kCounter ? "counter" : "dict", pairs()}});
    case Value::Kind::kOrdered:
      return dict({{"ordered", pairs()}});
    case Value::Kind::kGlobal:
      return dict({{"global", Value::words(v.text)}});
    case Value::Kind::kDevice:
      return dict({{"device", Value::words(v.text)}});
    default:
      return v;
  }
}

Result<Value> untyped(const Value& v, const std::string& what) {
  if (v.is(Value::Kind::kList)) {
    Value out = Value::list({});
    for (const Value& item : v.items) {
      ASSIGN_OR_RETURN(value, untyped(item, what));
      out.items.push_back(std::move(value));
    }
    return out;
  }
  if (!v.is_dict()) return v;
  if (v.items.size() != 2) return bad(what + ": has a value of unknown type");
  const std::string& type = v.items[0].text;
  const Value& inside = v.items[1];
  if (inside.is(Value::Kind::kText)) {
    if (type == "float") {
      ASSIGN_OR_RETURN(x, float_of(inside.text, what));
      return Value::floating(x);
    }
    if (type == "text" || type == "bytes" || type == "bytearray" || type == "long") {
      ASSIGN_OR_RETURN(bytes, unhex(inside.text, what));
      if (type == "long" && (bytes.size() < 9 || bytes.size() > 255))
        return bad(what + ": has a long integer of " + std::to_string(bytes.size()) + " bytes");
      if (type == "text" && !is_utf8(bytes, true))
        return bad(what + ": has text that is not UTF-8");
      return Value{.kind = type == "text"        ? Value::Kind::kText
                           : type == "bytes"     ? Value::Kind::kBytes
                           : type == "bytearray" ? Value::Kind::kBytearray
                                                 : Value::Kind::kLong,
                   .text = std::move(bytes)};
    }
    if (type == "device") return Value{.kind = Value::Kind::kDevice, .text = inside.text};
    if (type == "global") {
      // Written into pickles again, so it must be one that we would have read from one.
      const std::string_view name = std::string_view(inside.text);
      if (name.starts_with("torch ") &&
          (find_dtype(name.substr(6)) != nullptr || is_layout(name.substr(6))))
        return Value{.kind = Value::Kind::kGlobal, .text = inside.text};
    }
  } else if (inside.is(Value::Kind::kList)) {
    ASSIGN_OR_RETURN(value, untyped(inside, what));
    if (type == "tuple" || type == "size") {
      value.kind = type == "tuple" ? Value::Kind::kTuple : Value::Kind::kSize;
      for (const Value& item : value.items) {
        if (type == "size" && !item.is(Value::Kind::kInt))
          return bad(what + ": has a size that is not of whole numbers");
      }
      return value;
    }
    if (type == "set") {
      value.kind = Value::Kind::kSet;
      return value;
    }
    if (type == "complex") {
      const auto is_float = [](const Value& part) { return part.is(Value::Kind::kFloat); };
      if (value.items.size() != 2 || !is_float(value.items[0]) || !is_float(value.items[1]))
        return bad(what + ": has a complex number that is not of two floats");
      value.kind = Value::Kind::kComplex;
      return value;
    }
    if (type == "dict" || type == "ordered" || type == "counter") {
      Value out{.kind = type == "ordered" ? Value::Kind::kOrdered : Value::Kind::kDict};
      if (type == "counter") out.text = Value::kCounter;
      for (Value& pair : value.items) {
        if (!pair.is(Value::Kind::kList) || pair.items.size() != 2)
          return bad(what + ": has a dict of something else than pairs");
        for (Value& item : pair.items) out.items.push_back(std::move(item));
      }
      return out;
    }
  }
  return bad(what + ": has a value of the unknown type " + printable(type));
}

/// A path: text keys and number keys as they are, places as {"list": 3}, {"tuple": 3}.
Value path_value(const Path& path) {
  Value out = Value::list({});
  for (const Key& key : path) {
    const Value n = Value::number(key.number);
    switch (key.kind) {
      case Key::Kind::kName:
        out.items.push_back(typed(Value::words(key.name)));
        break;
      case Key::Kind::kNumber:
        out.items.push_back(n);
        break;
      default:
        out.items.push_back(dict({{key.kind == Key::Kind::kIndex ? "list" : "tuple", n}}));
    }
  }
  return out;
}
Result<Path> path_of(const Value* v, const std::string& what) {
  Path out;
  if (v == nullptr || !v->is(Value::Kind::kList) || v->items.size() > Value::kMaxDepth)
    return bad(what + ": has a leaf without a path");
  for (const Value& key : v->items) {
    const Value *list = key.find("list"), *tuple = key.find("tuple"), *place = list ? list : tuple;
    if (key.is(Value::Kind::kText)) {
      out.emplace_back(key.text);
    } else if (key.is(Value::Kind::kInt)) {
      out.emplace_back(Key::Kind::kNumber, key.integer);
    } else if (place != nullptr && place->is(Value::Kind::kInt) && place->integer >= 0) {
      out.emplace_back(list ? Key::Kind::kIndex : Key::Kind::kTupleIndex, place->integer);
    } else {
      ASSIGN_OR_RETURN(text, untyped(key, what));
      if (!text.is(Value::Kind::kText)) return bad(what + ": has a path of unknown keys");
      out.emplace_back(text.text);
    }
  }
  return out;
}

Result<Described> leaf_of(const Value& v, const std::string& what) {
  Described out;
  ASSIGN_OR_RETURN(path, path_of(v.find("path"), what));
  out.path = std::move(path);
  if (const Value* tensor = v.find("tensor"); tensor != nullptr && tensor->is(Value::Kind::kText)) {
    out.tensor = tensor->text;
    const auto is_true = [&v](const char* key) {
      const Value* said = v.find(key);
      return said != nullptr && said->is(Value::Kind::kBool) && said->integer != 0;
    };
    out.gradient = {is_true("parameter"), is_true("requires_grad")};
    return out;
  }
  if (const Value* value = v.find("value")) {
    out.kind = Described::Kind::kValue;
    ASSIGN_OR_RETURN(plain, untyped(*value, what));
    out.value = std::move(plain);
    return out;
  }
  const Value *cls = v.find("class"), *dtype = v.find("dtype"), *shape = v.find("shape"),
              *attributes = v.find("attributes"), *parts = v.find("parts");
  if (cls == nullptr || !cls->is(Value::Kind::kText) || dtype == nullptr ||
      !dtype->is(Value::Kind::kText) || find_dtype(dtype->text) == nullptr || shape == nullptr ||
      !shape->is(Value::Kind::kList) || attributes == nullptr || parts == nullptr ||
      !parts->is_dict() || parts->items.empty()) {
    return bad(what + ": has a leaf that is neither a tensor, a value nor a subclass");
  }
  out.kind = Described::Kind::kSubclass;
  out.cls = cls->text;
  out.dtype = find_dtype(dtype->text);
  for (const Value& size : shape->items) {
    if (!size.is(Value::Kind::kInt)) return bad(what + ": has a shape of something else");
    out.shape.push_back(size.integer);
  }
  RETURN_IF_ERROR(elements(out.shape, what).ok() ? fine()
                                                 : Status(bad(what + ": has a shape too large")));
  ASSIGN_OR_RETURN(plain, untyped(*attributes, what));
  if (!plain.is_dict()) return bad(what + ": has attributes that are not a dict");
  out.value = std::move(plain);
  for (size_t i = 0; i + 1 < parts->items.size(); i += 2) {
    if (!parts->items[i + 1].is(Value::Kind::kText))
      return bad(what + ": has a subclass without tensors");
    out.parts.emplace_back(parts->items[i].text, parts->items[i + 1].text);
  }
  return out;
}

}  // namespace

Result<std::string> describe(const Description& description, const std::string& what) {
  Value leaves = Value::list({}), holders = Value::list({});
  for (const Described& leaf : description.leaves) {
    Value v = dict({{"path", path_value(leaf.path)}});
    if (leaf.kind == Described::Kind::kTensor) {
      v.set("tensor", Value::words(leaf.tensor));
      if (leaf.gradient.parameter) v.set("parameter", Value::boolean(true));
      if (leaf.gradient.requires_grad) v.set("requires_grad", Value::boolean(true));
    } else if (leaf.kind == Described::Kind::kValue) {
      v.set("value", typed(leaf.value));
    } else {
      v.set("class", Value::words(leaf.cls));
      v.set("dtype", Value::words(leaf.dtype->name));
      Value shape = Value::list({}), parts{.kind = Value::Kind::kDict};
      for (const int64_t size : leaf.shape) shape.items.push_back(Value::number(size));
      for (const auto& [name, tensor] : leaf.parts) parts.set(name, Value::words(tensor));
      v.set("shape", std::move(shape));
      v.set("attributes", typed(leaf.value));
      v.set("parts", std::move(parts));
    }
    leaves.items.push_back(std::move(v));
  }
  for (const DictInfo& info : description.dicts) {
    Value v = dict({{"path", path_value(info.path)}, {"ordered", Value::boolean(info.ordered)}});
    if (!info.attributes.is(Value::Kind::kNone)) v.set("attributes", typed(info.attributes));
    holders.items.push_back(std::move(v));
  }
  return json_text(dict({{"version", Value::number(1)},
                         {"leaves", std::move(leaves)},
                         {"holders", std::move(holders)}}),
                   kMaxValues, what);
}

Result<Description> parse_description(std::string_view json, const std::string& file) {
  const std::string what = file + ": __metadata__: " + kConvention;
  ASSIGN_OR_RETURN(root, parse_json(json, kMaxValues, what));
  const Value *version = root.find("version"), *leaves = root.find("leaves"),
              *holders = root.find("holders");
  if (version == nullptr || leaves == nullptr || holders == nullptr ||
      !leaves->is(Value::Kind::kList) || !holders->is(Value::Kind::kList))
    return bad(what + ": does not describe a tree");
  if (!version->is(Value::Kind::kInt) || version->integer != 1)
    return bad(what + ": is of a later version; use a newer lowbit-ckpt");
  Description out;
  for (const Value& v : leaves->items) {
    ASSIGN_OR_RETURN(leaf, leaf_of(v, what));
    out.leaves.push_back(std::move(leaf));
  }
  for (const Value& v : holders->items) {
    DictInfo info;
    ASSIGN_OR_RETURN(path, path_of(v.find("path"), what));
    info.path = std::move(path);
    const Value *ordered = v.find("ordered"), *attributes = v.find("attributes");
    info.ordered = ordered != nullptr && ordered->is(Value::Kind::kBool) && ordered->integer != 0;
    if (attributes != nullptr) {
      ASSIGN_OR_RETURN(value, untyped(*attributes, what));
      if (!value.is_dict()) return bad(what + ": has attributes that are not a dict");
      info.attributes = std::move(value);
    }
    out.dicts.push_back(std::move(info));
  }
  return out;
}

}  // namespace lowbit::ckpt
