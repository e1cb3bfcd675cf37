#include "pickle/plain.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <functional>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

class Unfolder {
 public:
  Unfolder(const Pickle& p, const std::string& what, uint64_t limit)
      : p_(p), what_(what), left_(limit) {}

  Result<Value> value(NodeId id, int depth) {
    if (depth > Value::kMaxDepth)
      return bad(what_ + ": is nested more than " + std::to_string(Value::kMaxDepth) + " deep");
    if (left_-- == 0) return bad(what_ + ": unfolds to too many values");
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
        return Value::words(std::string(p_.text(id)));
      case Kind::kBytes:
        return Value{.kind = Value::Kind::kBytes, .text = std::string(p_.text(id))};
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
      default:
        return bad(what_ + ": holds an object, which is no plain value");
    }
  }

 private:
  Result<Value> items(NodeId id, Value::Kind kind, int depth) {
    Value out{.kind = kind};
    for (const NodeId item : p_.items(id)) {
      ASSIGN_OR_RETURN(v, value(item, depth + 1));
      out.items.push_back(std::move(v));
    }
    return out;
  }
  Result<Value> dict(NodeId id, int depth) {
    if (const auto key = p_.repeated_key(id))
      return bad(what_ + ": has the key " + printable(*key) + " twice");
    if (p_.attributes(id) != kNoNode)
      return bad(what_ + ": holds an OrderedDict with attributes, which is no plain value");
    const auto all = p_.items(id);
    for (size_t i = 0; i < all.size(); i += 2) {
      if (!hashable(all[i], depth))
        return bad(what_ + ": has a key that is a list or a dict, which Python does not allow");
    }
    ASSIGN_OR_RETURN(out,
                     items(id, p_.ordered(id) ? Value::Kind::kOrdered : Value::Kind::kDict, depth));
    if (p_.configuration(id)) out.text = Value::kConfiguration;
    return out;
  }
  bool hashable(NodeId id, int depth) {
    if (left_ == 0) return false;
    --left_;
    if (p_.is(id, Kind::kList) || p_.is(id, Kind::kDict)) return false;
    if (!p_.is(id, Kind::kTuple) || depth > Value::kMaxDepth) return true;
    for (const NodeId item : p_.items(id)) {
      if (!hashable(item, depth + 1)) return false;
    }
    return true;
  }
  /// What protocol 2 makes of bytes: each as the character of that number.
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
    if (rule != nullptr && rule->name == "encode" && p_.text(p_.item(arguments, 1)) == "latin1")
      return latin1(p_.item(arguments, 0));
    if (rule != nullptr && rule->name == "bytes") return Value{.kind = Value::Kind::kBytes};
    if (rule != nullptr && rule->name == "device" && p_.items(arguments).size() <= 2) {
      std::string text(p_.text(p_.item(arguments, 0)));
      if (p_.is(p_.item(arguments, 1), Kind::kInt))
        text += ":" + std::to_string(p_.integer(p_.item(arguments, 1)));
      return Value{.kind = Value::Kind::kDevice, .text = std::move(text)};
    }
    return bad(what_ + ": holds " +
               (rule == nullptr ? "a call" : "a " + printable(std::string(rule->name))) +
               ", which is no plain value");
  }

  const Pickle& p_;
  const std::string& what_;
  uint64_t left_;
};

}  // namespace

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

Result<Value> plain_value(const Pickle& pickle, NodeId node, const std::string& what,
                          uint64_t limit) {
  return Unfolder(pickle, what, limit).value(node, 0);
}

void write_items(PickleWriter& to, size_t count, const std::function<void(size_t)>& item) {
  constexpr size_t kBatch = 1000;
  if (count == 1) {
    item(0);
    to.append();
    return;
  }
  for (size_t i = 0; i < count;) {
    to.mark();
    for (const size_t end = std::min(count, i + kBatch); i < end; ++i) item(i);
    to.appends();
  }
}

void write_entries(PickleWriter& to, size_t count, bool ordered,
                   const std::function<void(size_t)>& entry) {
  constexpr size_t kBatch = 1000;
  if (count == 1) {
    entry(0);
    to.set_item();
    return;
  }
  for (size_t i = 0; i < count;) {
    // In an OrderedDict, Python's pickler looks one item ahead, so it sets a single last entry alone.
    const bool alone = ordered && i + 1 == count;
    const size_t end = std::min(count, i + kBatch);
    const bool full = end - i == kBatch;
    if (!alone) to.mark();
    for (; i < end; ++i) entry(i);
    if (alone) {
      to.set_item();
    } else {
      to.set_items();
    }
    // In a dict it learns that it is at the end only when it asks for more.
    if (!ordered && full && i == count) to.mark().set_items();
  }
}

void write_value(PickleWriter& to, const Value& v) {
  const auto size = v.items.size();
  const auto tuple = [&] {
    if (size > 3) to.mark();
    for (const Value& item : v.items) write_value(to, item);
    to.tuple(size);
    if (size > 0) to.put();
  };
  switch (v.kind) {
    case Value::Kind::kNone:
      to.none();
      return;
    case Value::Kind::kBool:
      to.boolean(v.integer != 0);
      return;
    case Value::Kind::kInt:
      to.integer(v.integer);
      return;
    case Value::Kind::kFloat:
      to.floating(v.real);
      return;
    case Value::Kind::kText:
      to.text(v.text);
      return;
    case Value::Kind::kBytes:
      to.bytes(v.text);
      return;
    case Value::Kind::kList:
      to.empty_list().put();
      write_items(to, size, [&](size_t i) { write_value(to, v.items[i]); });
      return;
    case Value::Kind::kTuple:
      tuple();
      return;
    case Value::Kind::kOrdered:
    case Value::Kind::kDict: {
      const bool ordered = v.kind == Value::Kind::kOrdered;
      if (ordered) {
        to.global("collections", "OrderedDict").tuple(0).call().put();
      } else if (!v.text.empty()) {
        to.global("yacs.config", "CfgNode").object().put();
      } else {
        to.empty_dict().put();
      }
      write_entries(to, size / 2, ordered, [&](size_t i) {
        write_value(to, v.items[2 * i]);
        write_value(to, v.items[2 * i + 1]);
      });
      if (!ordered && !v.text.empty()) {
        // What yacs keeps beside the entries; a node without it cannot be merged or frozen.
        to.empty_dict().put().mark();
        to.text("__immutable__").boolean(false);
        to.text("__deprecated_keys__")
            .global("__builtin__", "set")
            .empty_list()
            .put()
            .tuple(1)
            .put()
            .call()
            .put();
        to.text("__renamed_keys__").empty_dict().put();
        to.text("__new_allowed__").boolean(false);
        to.set_items().build();
      }
      return;
    }
    case Value::Kind::kGlobal: {
      const size_t space = v.text.find(' ');
      to.global(v.text.substr(0, space), v.text.substr(space + 1));
      return;
    }
    case Value::Kind::kDevice: {
      const size_t colon = v.text.find(':');
      const char *end = v.text.data() + v.text.size(), *number = v.text.data() + colon + 1;
      int index = 0;
      const bool numbered = colon != std::string::npos && number < end &&
                            std::from_chars(number, end, index).ptr == end;
      to.global("torch", "device").text(numbered ? v.text.substr(0, colon) : v.text);
      if (numbered) to.integer(index);
      to.tuple(numbered ? 2 : 1).put().call().put();
      return;
    }
    case Value::Kind::kSize:
      to.global("torch", "Size");
      tuple();
      to.tuple(1).put().call().put();
      return;
  }
}

}  // namespace lowbit::ckpt
