#include "pickle/plain.h"

#include <algorithm>
#include <bit>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

class Unfolder {
 public:
  Unfolder(const Pickle& p, const std::string& what, uint64_t most)
      : p_(p), what_(what), left_(most) {}

  Result<Value> value(NodeId id, int depth) {
    if (depth > Value::kMostDepth)
      return bad(what_ + ": is nested more than " + std::to_string(Value::kMostDepth) + " deep");
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
      LB_TRY(v, value(item, depth + 1));
      out.items.push_back(std::move(v));
    }
    return out;
  }
  Result<Value> dict(NodeId id, int depth) {
    if (const auto key = p_.repeated_key(id))
      return bad(what_ + ": has the key " + printable(*key) + " twice");
    return items(id, Value::Kind::kDict, depth);
  }
  Result<Value> call(NodeId id, int depth) {
    const GlobalRule* rule = p_.global(id);
    const NodeId arguments = p_.item(id, 1);
    if (rule != nullptr && rule->name == "Size")
      return items(p_.item(arguments, 0), Value::Kind::kSize, depth);
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
                          uint64_t most) {
  return Unfolder(pickle, what, most).value(node, 0);
}

void write_value(PickleWriter& to, const Value& v) {
  const auto all = [&](const std::vector<Value>& items) {
    for (const Value& item : items) write_value(to, item);
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
      to.empty_list();
      if (v.items.empty()) return;
      to.mark();
      all(v.items);
      to.appends();
      return;
    case Value::Kind::kTuple:
      if (v.items.size() > 3) to.mark();
      all(v.items);
      to.tuple(v.items.size());
      return;
    case Value::Kind::kOrdered:
      to.global("collections", "OrderedDict").tuple(0).call();
      [[fallthrough]];
    case Value::Kind::kDict:
      if (v.kind == Value::Kind::kDict) to.empty_dict();
      if (v.items.empty()) return;
      to.mark();
      all(v.items);
      to.set_items();
      return;
    case Value::Kind::kGlobal: {
      const size_t space = v.text.find(' ');
      to.global(v.text.substr(0, space), v.text.substr(space + 1));
      return;
    }
    case Value::Kind::kDevice: {
      const size_t colon = v.text.find(':');
      to.global("torch", "device").text(v.text.substr(0, colon));
      if (colon != std::string::npos) to.integer(std::stoll(v.text.substr(colon + 1)));
      to.tuple(colon == std::string::npos ? 1 : 2).call();
      return;
    }
    case Value::Kind::kSize:
      to.global("torch", "Size");
      if (v.items.size() > 3) to.mark();
      all(v.items);
      to.tuple(v.items.size()).tuple(1).call();
      return;
  }
}

}  // namespace lowbit::ckpt
