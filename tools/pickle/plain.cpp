#include "pickle/plain.h"

#include <algorithm>
#include <functional>

#include "io/text.h"
#include "pickle/numpy_value.h"
#include "pickle/schema.h"

namespace lowbit::ckpt {
namespace {

class Unfolder {
 public:
  Unfolder(const Pickle& p, const std::string& what, uint64_t limit, PickleBudget& budget)
      : p_(p), what_(what), left_(limit), budget_(budget) {}

  Result<Value> value(NodeId id, int depth) {
    if (depth > Value::kMaxDepth)
      return bad(what_ + ": is nested more than " + std::to_string(Value::kMaxDepth) + " deep");
    if (left_-- == 0)
      return too_large(what_ +
                       ": unfolds to too many values; save long lists of numbers as tensors");
    switch (p_.kind(id)) {
      case Kind::kNone:
        return Value::none();
      case Kind::kBool:
        return Value::boolean(p_.integer(id) != 0);
      case Kind::kInt:
        return Value::number(p_.integer(id));
      case Kind::kFloat:
        return Value::floating(p_.real(id));
      case Kind::kString:
        return text(id, Value::Kind::kText);
      case Kind::kBytes:
        return text(id, Value::Kind::kBytes);
      case Kind::kList:
        return items(id, Value::Kind::kList, depth);
      case Kind::kTuple:
        return items(id, Value::Kind::kTuple, depth);
      case Kind::kDict:
        return dict(id, depth);
      case Kind::kGlobal:
        return Value{
            .kind = Value::Kind::kGlobal,
            .text = std::string(p_.global(id)->module) + " " + std::string(p_.global(id)->name)};
      case Kind::kCall:
        return call(id, depth);
      case Kind::kLong:
        return text(id, Value::Kind::kLong);
      case Kind::kSet:
        return set(id, depth);
      case Kind::kUnknown:
      case Kind::kOpaque:
        return opaque(id, p_.opaque_name(id));
      case Kind::kPersistent:
        if (p_.opaque && p_.holds_tensor(id)) return opaque(id, "a storage");
        return bad(what_ + ": holds an object, which is not a plain value");
      default:
        if (p_.opaque && p_.is(id, Kind::kObject) && p_.global(id)->name == "fragment_address")
          return fragment(id);
        if (p_.opaque && p_.is(id, Kind::kObject) && p_.global(id)->name == "DynamicLossScaler")
          return scaler(id, depth);
        if (p_.opaque && p_.global(id) != nullptr) return opaque(id, name_of(*p_.global(id)));
        return bad(what_ + ": holds an object, which is not a plain value");
    }
  }

 private:
  static std::string name_of(const GlobalRule& rule) {
    return std::string(rule.module) + "." + std::string(rule.name);
  }
  Value opaque(NodeId id, std::string_view name) const {
    const bool masked = name.starts_with("numpy.ma.") && name.ends_with("_mareconstruct");
    const auto kind = p_.holds_tensor(id) ? Value::kHolder
                      : masked            ? Value::kUnreadArray
                                          : Value::kObject;
    return {.kind = Value::Kind::kOpaque, .integer = kind, .text = std::string(name)};
  }
  /// DeepSpeed's: opaque too, with its two numbers, which place a slice.
  Value fragment(NodeId id) {
    Value out = opaque(id, name_of(*p_.global(id)));
    const NodeId state = p_.item(id, 2);
    const NodeId numel = p_.find(state, "numel"), start = p_.find(state, "start");
    if (p_.is(numel, Kind::kInt) && p_.is(start, Kind::kInt))
      out.items = {Value::number(p_.integer(numel)), Value::number(p_.integer(start))};
    return out;
  }
  /// DeepSpeed's: opaque too, with its attributes where all are plain.
  Result<Value> scaler(NodeId id, int depth) {
    Value out = opaque(id, name_of(*p_.global(id)));
    const NodeId state = p_.item(id, 2);
    if (out.integer != Value::kObject || !p_.is(state, Kind::kDict)) return out;
    ASSIGN_OR_RETURN(attributes, dict(state, depth + 1));
    if (!attributes.is_opaque()) out.items.push_back(std::move(attributes));
    return out;
  }
  Status spend(NodeId text) { return budget_.spend_text(p_.text(text).size(), what_); }
  Result<Value> text(NodeId id, Value::Kind kind) {
    RETURN_IF_ERROR(spend(id));
    return Value{.kind = kind, .text = std::string(p_.text(id))};
  }
  Result<Value> items(NodeId id, Value::Kind kind, int depth) {
    Value out{.kind = kind};
    for (const NodeId item : p_.items(id)) {
      ASSIGN_OR_RETURN(v, value(item, depth + 1));
      out.items.push_back(std::move(v));
    }
    return out;
  }
  /// The items of a set, or of the list that it is made of.
  Result<Value> set(NodeId id, int depth) {
    ASSIGN_OR_RETURN(out, items(id, Value::Kind::kSet, depth));
    for (const NodeId item : p_.items(id)) {
      if (!hashable(p_, item, left_, depth))
        return bad(what_ + ": has a set of lists, dicts or sets, which Python does not allow");
    }
    return out;
  }
  Result<Value> dict(NodeId id, int depth) {
    if (const auto key = p_.repeated_key(id))
      return bad(what_ + ": has the key " + printable(*key) + " twice");
    if (const auto key = p_.repeated_number(id))
      return bad(what_ + ": has the key " + *key + " twice: Python takes 1, 1.0 and True for one");
    if (p_.attributes(id) != kNoNode)
      return bad(what_ + ": holds an OrderedDict with attributes, which is not a plain value");
    const auto all = p_.items(id);
    for (size_t i = 0; i < all.size(); i += 2) {
      if (!hashable(p_, all[i], left_, depth))
        return bad(what_ +
                   ": has a key that is a list, a dict or a set, which Python does not allow");
    }
    ASSIGN_OR_RETURN(out,
                     items(id, p_.ordered(id) ? Value::Kind::kOrdered : Value::Kind::kDict, depth));
    if (p_.configuration(id)) out.text = Value::kConfiguration;
    return out;
  }
  /// What protocol 2 makes of bytes: each as the character of that number. The caller counts them.
  Result<Value> latin1(NodeId id) {
    Value out{.kind = Value::Kind::kBytes};
    const std::string_view text = p_.text(id);
    for (size_t i = 0; i < text.size(); ++i) {
      auto c = static_cast<uint8_t>(text[i]);
      if (c >= 0x80) {
        if (c > 0xc3 || i + 1 == text.size()) return bad(what_ + ": holds bytes that are none");
        c = static_cast<uint8_t>(c << 6 | (static_cast<uint8_t>(text[++i]) & 0x3f));
      }
      out.text += static_cast<char>(c);
    }
    return out;
  }
  Result<Value> call(NodeId id, int depth) {
    const GlobalRule* rule = p_.global(id);
    const NodeId arguments = p_.item(id, 1);
    if (rule != nullptr && rule->name == "Size")
      return items(p_.item(arguments, 0), Value::Kind::kSize, depth);
    if (rule != nullptr && rule->name == "encode" && p_.text(p_.item(arguments, 1)) == "latin1") {
      RETURN_IF_ERROR(spend(p_.item(arguments, 0)));
      return latin1(p_.item(arguments, 0));
    }
    const NodeId first = p_.item(arguments, 0);
    if (rule != nullptr && (rule->name == "bytes" || rule->name == "bytearray")) {
      if (first != kNoNode) RETURN_IF_ERROR(spend(text_of(first)));
      return bytes(first, rule->name == "bytes" ? Value::Kind::kBytes : Value::Kind::kBytearray);
    }
    if (rule != nullptr && rule->name == "set") return set(first, depth);
    if (rule != nullptr && rule->name == "Counter") {
      if (first == kNoNode)
        return Value{.kind = Value::Kind::kDict, .text = std::string(Value::kCounter)};
      ASSIGN_OR_RETURN(out, dict(first, depth));
      out.kind = Value::Kind::kDict;
      out.text = Value::kCounter;
      return out;
    }
    if (rule != nullptr && rule->name == "complex") {
      Value out{.kind = Value::Kind::kComplex};
      for (const NodeId part : p_.items(arguments))
        out.items.push_back(Value::floating(
            p_.is(part, Kind::kInt) ? static_cast<double>(p_.integer(part)) : p_.real(part)));
      return out;
    }
    if (rule != nullptr && rule->name == "_get_layout" && p_.text(first).starts_with("torch.") &&
        is_layout(p_.text(first).substr(6)))
      return Value{.kind = Value::Kind::kGlobal,
                   .text = "torch " + std::string(p_.text(first).substr(6))};
    if (rule != nullptr && rule->module.starts_with("numpy")) return numpy(id, *rule);
    if (rule != nullptr && rule->name == "device" && p_.items(arguments).size() <= 2) {
      RETURN_IF_ERROR(spend(first));
      std::string text(p_.text(first));
      if (p_.is(p_.item(arguments, 1), Kind::kInt))
        text += ":" + std::to_string(p_.integer(p_.item(arguments, 1)));
      return Value{.kind = Value::Kind::kDevice, .text = std::move(text)};
    }
    if (p_.opaque && rule != nullptr && (rule->object || rule->name.starts_with("_rebuild_")))
      return opaque(id, name_of(*rule));
    return bad(what_ + ": holds " +
               (rule == nullptr ? "a call" : "a " + printable(std::string(rule->name))) +
               ", which is not a plain value");
  }

  /// Where the bytes of bytes() lie.
  NodeId text_of(NodeId id) const {
    return p_.is(id, Kind::kCall) ? p_.item(p_.item(id, 1), 0) : id;
  }
  /// Bytes, or text that stands for them byte by byte; the caller counts them. An encoding but
  /// latin-1 is text of Python 2.
  Result<Value> bytes(NodeId id, Value::Kind kind) {
    Value out{.kind = kind};
    if (p_.is(id, Kind::kBytes)) {
      out.text = std::string(p_.text(id));
    } else if (id != kNoNode) {
      ASSIGN_OR_RETURN(decoded, latin1(text_of(id)));
      out.text = std::move(decoded.text);
    }
    return out;
  }
  /// The code of a dtype ("f8"); "" for anything but one in this machine's byte order.
  std::string numpy_code(NodeId id) const {
    const GlobalRule* rule = p_.is(id, Kind::kCall) ? p_.global(id) : nullptr;
    if (rule == nullptr || rule->name != "dtype") return "";
    const NodeId order = p_.item(p_.item(id, 2), 1);
    if (p_.is(order, Kind::kString) && p_.text(order) == ">") return "";
    return std::string(p_.text(p_.item(p_.item(id, 1), 0)));
  }
  /// Whether the dtype at a node is of numbers, also in another machine's byte order, or of
  /// records.
  bool is_of_numbers(NodeId id) const {
    const GlobalRule* rule = p_.is(id, Kind::kCall) ? p_.global(id) : nullptr;
    if (rule == nullptr || rule->name != "dtype") return false;
    const std::string_view code = p_.text(p_.item(p_.item(id, 1), 0));
    return !code.empty() && std::string_view("bifucV").find(code[0]) != std::string_view::npos;
  }
  /// Whether a node is bytes(), which is how protocol 2 has no bytes.
  bool is_no_bytes(NodeId id) const {
    return p_.is(id, Kind::kCall) && p_.global(id)->name == "bytes" &&
           p_.items(p_.item(id, 1)).empty();
  }
  /// The array at a node with its content, if it is one of plain numbers and there is room for it.
  Result<Value> array(NodeId id, std::string name) {
    const auto found = p_.opaque ? numpy_array(p_, id) : std::nullopt;
    if (!found) return opaque(id, name);
    NodeId content = found->content;
    const bool none = is_no_bytes(content);
    if (none) content = kNoNode;
    const bool coded = p_.is(content, Kind::kCall) && p_.global(content)->name == "encode" &&
                       p_.text(p_.item(p_.item(content, 1), 1)) == "latin1";
    if (!none && !coded && !p_.is(content, Kind::kBytes)) return opaque(id, name);
    // As text in latin-1, a byte takes one or two. Whatever is inspected counts, with or without a
    // result.
    const uint64_t length = none ? 0 : p_.text(text_of(content)).size();
    const bool fits =
        coded ? length >= found->bytes && length <= 2 * found->bytes : length == found->bytes;
    if (!fits || found->bytes > budget_.arrays) return opaque(id, name);
    budget_.arrays -= found->bytes;
    ASSIGN_OR_RETURN(held, bytes(content, Value::Kind::kBytes));
    if (held.text.size() != found->bytes) return opaque(id, name);
    return array_value(*found, std::move(name), std::move(held.text));
  }
  /// A number of numpy as Python's; an array of anything but numbers by its type and shape alone.
  Result<Value> numpy(NodeId id, const GlobalRule& rule) {
    const NodeId arguments = p_.item(id, 1);
    if (rule.name == "scalar") {
      const std::string code = numpy_code(p_.item(arguments, 0));
      const bool words = code.starts_with('U') || code.starts_with('S');
      const NodeId given = p_.item(arguments, 1);
      const bool none = is_no_bytes(given);
      if (!none && !arguments_match(p_, arguments, "xy")) return opaque(id, "numpy scalar");
      const NodeId text = none ? kNoNode : text_of(given);
      constexpr size_t kLongest = 32;  // of 16 bytes, which as text take one or two each
      if (text != kNoNode && !words && p_.text(text).size() > kLongest)
        return opaque(id, "numpy scalar");
      if (text != kNoNode && words) RETURN_IF_ERROR(spend(text));
      ASSIGN_OR_RETURN(content, bytes(none ? kNoNode : given, Value::Kind::kBytes));
      const Value number =
          words ? numpy_text(code, content.text) : numpy_number(numpy_dtype(code), content.text);
      return number.is(Value::Kind::kNone) ? opaque(id, "numpy scalar") : number;
    }
    if (rule.name == "_reconstruct") {
      // (version, shape, dtype, by columns, bytes)
      const NodeId state = p_.item(id, 2), shape = p_.item(state, 1);
      const std::string dtype = numpy_dtype(numpy_code(p_.item(state, 2)));
      std::string text = "numpy.ndarray";
      if (!dtype.empty()) text += " " + dtype;
      if (p_.is(shape, Kind::kTuple)) {
        text += " [";
        for (size_t i = 0; i < std::min<size_t>(p_.items(shape).size(), 8); ++i) {
          const NodeId size = p_.items(shape)[i];
          text += (i > 0 ? ", " : "") +
                  (p_.is(size, Kind::kInt) ? std::to_string(p_.integer(size)) : "?");
        }
        text += "]";
      }
      ASSIGN_OR_RETURN(made, array(id, std::move(text)));
      if (made.integer == Value::kObject && is_of_numbers(p_.item(state, 2)))
        made.integer = Value::kUnreadArray;
      return made;
    }
    return opaque(id, name_of(rule));
  }

  const Pickle& p_;
  const std::string& what_;
  uint64_t left_;
  PickleBudget& budget_;
};

}  // namespace

bool is_layout(std::string_view name) {
  for (const char* known : {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr",
                            "sparse_bsc", "jagged"}) {
    if (name == known) return true;
  }
  return false;
}

std::string opaque_names(const Value& value) {
  std::vector<std::string> names;
  const std::function<void(const Value&)> collect = [&](const Value& v) {
    if (v.is(Value::Kind::kOpaque) && std::ranges::find(names, v.text) == names.end())
      names.push_back(v.text);
    for (const Value& item : v.items) collect(item);
  };
  collect(value);
  return some_of(names);
}

std::string hexadecimal(const Value& v) {
  std::string bytes = v.text;
  const bool negative = !bytes.empty() && (static_cast<uint8_t>(bytes.back()) & 0x80) != 0;
  unsigned carry = 1;
  for (char& c : bytes) {
    if (!negative) break;
    const unsigned b = static_cast<uint8_t>(~c) + carry;
    c = static_cast<char>(b);
    carry = b >> 8;
  }
  std::string out;
  for (size_t i = bytes.size(); i-- > 0;) {
    for (const int shift : {4, 0}) {
      const char digit = "0123456789abcdef"[static_cast<uint8_t>(bytes[i]) >> shift & 15];
      if (!out.empty() || digit != '0') out += digit;
    }
  }
  return (negative ? "-0x" : "0x") + (out.empty() ? "0" : out);
}

bool Value::is_opaque() const {
  return kind == Kind::kOpaque ||
         std::ranges::any_of(items, [](const Value& item) { return item.is_opaque(); });
}

bool Value::holds_tensor() const {
  return (kind == Kind::kOpaque && (integer == kTensor || integer == kHolder)) ||
         std::ranges::any_of(items, [](const Value& item) { return item.holds_tensor(); });
}

bool Value::holds_array() const {
  return (kind == Kind::kOpaque && (integer == kArray || integer == kUnreadArray)) ||
         std::ranges::any_of(items, [](const Value& item) { return item.holds_array(); });
}

uint64_t Value::count() const {
  uint64_t n = 1;
  for (const Value& item : items) n += item.count();
  return n;
}

const Value* Value::find(std::string_view key) const {
  if (!is_dict()) return nullptr;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i].is(Kind::kText) && items[i].text == key) return &items[i + 1];
  }
  return nullptr;
}

void Value::set(std::string_view key, Value value) {
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i].is(Kind::kText) && items[i].text == key) {
      items[i + 1] = std::move(value);
      return;
    }
  }
  items.push_back(words(std::string(key)));
  items.push_back(std::move(value));
}

Status PickleBudget::spend_text(uint64_t bytes, const std::string& what) {
  if (bytes > text)
    return too_large(
        what +
        ": its names and texts unfold to too many bytes, because it refers to long ones many "
        "times; save them once");
  text -= bytes;
  return fine();
}

bool hashable(const Pickle& pickle, NodeId node, uint64_t& left, int depth) {
  if (left == 0) return false;
  --left;
  if (pickle.is(node, Kind::kList) || pickle.is(node, Kind::kDict) || pickle.is(node, Kind::kSet))
    return false;
  if (pickle.is(node, Kind::kCall)) {  // a set or a bytearray of protocol 2
    const GlobalRule* rule = pickle.global(node);
    return rule == nullptr || (rule->name != "set" && rule->name != "bytearray");
  }
  if (!pickle.is(node, Kind::kTuple) || depth > Value::kMaxDepth) return true;
  for (const NodeId item : pickle.items(node)) {
    if (!hashable(pickle, item, left, depth + 1)) return false;
  }
  return true;
}

uint64_t value_limit(const Pickle& pickle, uint64_t bytes) {
  uint64_t references = pickle.nodes.size() + pickle.pool.size();
  for (const auto& list : pickle.lists) references += list.size();
  return std::min<uint64_t>(4 * references + 65536,
                            std::min<uint64_t>(262144 + bytes / 4, kMaxPlainValues));
}

Result<Value> plain_value(const Pickle& pickle, NodeId node, const std::string& what,
                          uint64_t limit, PickleBudget& budget) {
  return Unfolder(pickle, what, limit, budget).value(node, 0);
}
Result<Value> plain_value(const Pickle& pickle, NodeId node, const std::string& what,
                          uint64_t limit) {
  PickleBudget budget = PickleBudget::of(pickle);
  return plain_value(pickle, node, what, limit, budget);
}

}  // namespace lowbit::ckpt
