#include "pickle/reader.h"

#include <algorithm>
#include <unordered_map>

#include "io/text.h"
#include "pickle/opaque.h"
#include "pickle/reach.h"
#include "pickle/schema.h"

namespace lowbit::ckpt {
namespace {

constexpr size_t kMaxUnknown = 1u << 16;  // names outside the allowlist

class PickleReader {
 public:
  PickleReader(std::string bytes, const Allowlist& allowed, const std::string& what,
               const PickleLimits& limits)
      : allowed_(allowed), what_(what), limits_(limits) {
    out_.bytes = std::move(bytes);
    out_.rules = allowed.globals;
    out_.opaque = allowed.opaque;
    bytes_ = out_.bytes;
    if (limits_.bytes_per_node != 0)
      limits_.nodes = std::max(limits_.nodes, bytes_.size() / limits_.bytes_per_node);
  }

  Result<Pickle> read() {
    if (bytes_.size() > limits_.bytes)
      return too_large(no("has more than " + std::to_string(limits_.bytes) + " bytes").text);
    while (true) {
      uint64_t op;
      if (!number(1, op)) return cut("ends before its STOP");
      if (op == '.') break;
      if (Status s = step(static_cast<uint8_t>(op)); !s.ok()) return s.error();
      if (out_.nodes.size() > limits_.nodes || out_.pool.size() > 4 * limits_.nodes)
        return too_large(no("has more than " + std::to_string(limits_.nodes) + " values").text);
      if (stack_.size() > limits_.stack || marks_.size() > limits_.stack)
        return no("nests or stacks too deep");
    }
    if (at_ != bytes_.size()) return no("has bytes behind its STOP");
    if (stack_.size() != 1 || !marks_.empty()) return no("does not end with exactly one value");
    out_.root = stack_[0];
    if (allowed_.opaque) out_.tensors = tensor_holders(out_, given_);
    return std::move(out_);
  }

 private:
  Error no(const std::string& why) const {
    return bad(what_ + ": the pickle " + why + " (at byte " + std::to_string(at_) + ")");
  }
  Error cut(const std::string& why = "ends inside a value") const { return damaged(no(why).text); }
  Error empty() const { return no("takes more from the stack than there is"); }

  bool number(size_t width, uint64_t& n) {
    if (bytes_.size() - at_ < width) return false;
    n = 0;
    for (size_t i = 0; i < width; ++i)
      n |= static_cast<uint64_t>(static_cast<uint8_t>(bytes_[at_ + i])) << (8 * i);
    at_ += width;
    return true;
  }
  bool line(std::string_view& text) {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) return false;
    text = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return true;
  }

  Status push(Kind kind, uint64_t data = 0, uint32_t length = 0) {
    out_.nodes.push_back({kind, length, data});
    stack_.push_back(static_cast<NodeId>(out_.nodes.size() - 1));
    return fine();
  }
  /// A str of Python 2: text where it can be, else bytes.
  Status old_text(size_t width) {
    uint64_t n;
    if (!number(width, n) || n > bytes_.size() - at_) return cut();
    at_ += n;
    const bool text = is_utf8(bytes_.substr(at_ - n, n), false);
    return push(text ? Kind::kString : Kind::kBytes, at_ - n, static_cast<uint32_t>(n));
  }
  Status long_integer(uint64_t n) {
    if (n > bytes_.size() - at_) return cut();
    if (n > 8) {
      at_ += n;
      return push(Kind::kLong, at_ - n, static_cast<uint32_t>(n));
    }
    uint64_t bits = 0;
    if (!number(n, bits)) return cut();
    const unsigned shift = static_cast<unsigned>(64 - 8 * n);
    return integer(n == 0 ? 0 : static_cast<int64_t>(bits << shift) >> shift);
  }
  Status integer(int64_t value) { return push(Kind::kInt, static_cast<uint64_t>(value)); }
  /// Text whose length has `width` bytes.
  Status text(Kind kind, size_t width) {
    uint64_t n;
    if (!number(width, n) || n > bytes_.size() - at_) return cut();
    if (kind == Kind::kString && !is_utf8(bytes_.substr(at_, n), true))
      return no("has a string that is not UTF-8");
    at_ += n;
    return push(kind, at_ - n, static_cast<uint32_t>(n));
  }
  Status integer_of(size_t width, int64_t (*convert)(uint64_t)) {
    uint64_t n;
    return number(width, n) ? integer(convert(n)) : Status(cut());
  }
  /// Whether n values lie above the last mark.
  bool has(size_t n) const { return stack_.size() >= (marks_.empty() ? 0 : marks_.back()) + n; }
  NodeId pop() {
    const NodeId id = stack_.back();
    stack_.pop_back();
    return id;
  }
  /// Everything above the last mark becomes a tuple.
  Status tuple(size_t n) {
    if (!has(n)) return empty();
    const uint64_t start = out_.pool.size();
    out_.pool.insert(out_.pool.end(), stack_.end() - static_cast<std::ptrdiff_t>(n), stack_.end());
    stack_.resize(stack_.size() - n);
    return push(Kind::kTuple, start, static_cast<uint32_t>(n));
  }
  Status global(std::string_view module, std::string_view name) {
    for (size_t i = 0; i < allowed_.globals.size(); ++i) {
      if (allowed_.globals[i].module == module && allowed_.globals[i].name == name)
        return push(Kind::kGlobal, i);
    }
    if (out_.unknown.size() > kMaxUnknown)
      return no("names more than " + std::to_string(kMaxUnknown) +
                " globals outside the allowlist");
    if (allowed_.opaque && may_be_named(module, name))
      return push(Kind::kUnknown, name_of(module, name));
    return no(
        "names " + printable(std::string(module) + "." + std::string(name)) +
        ", which is outside the allowlist; nothing was executed. Loading it would run what it "
        "names: if you trust the file, save it again with tensors and plain values only");
  }
  /// The number of a name in `unknown`.
  uint64_t name_of(std::string_view module, std::string_view name) {
    std::string all = std::string(module) + "." + std::string(name);
    const auto [known, is_new] = unknown_.try_emplace(std::move(all), out_.unknown.size());
    if (is_new) out_.unknown.push_back(known->first);
    return known->second;
  }
  void note(const char* what) {
    if (std::ranges::find(out_.notes, what) == out_.notes.end()) out_.notes.emplace_back(what);
  }
  /// An object of an unknown class, or what an unknown function gives: called by its name. Its
  /// arguments and its state are only searched for tensors.
  Status call_unknown(NodeId callable, NodeId arguments) {
    const uint64_t number = out_.nodes[callable].data;
    const std::string_view all = out_.unknown[number];
    const std::string_view name = all.substr(all.rfind('.') + 1);
    // copyreg's own way to say which class it is.
    const NodeId first = out_.item(arguments, 0);
    const bool rebuilt = name == "_reconstructor" || name == "__newobj_ex__";
    RETURN_IF_ERROR(push(Kind::kOpaque, rebuilt && out_.is(first, Kind::kUnknown)
                                            ? out_.nodes[first].data
                                            : number));
    give(stack_.back(), callable);
    give(stack_.back(), arguments);
    return fine();
  }
  void give(NodeId object, NodeId held) { given_.emplace_back(object, held); }
  /// Items of containers are counted beside nodes: each may be the same node again.
  Status count_added(size_t n) {
    added_ += n;
    if (added_ > limits_.nodes)
      return too_large(no("has more than " + std::to_string(limits_.nodes) + " values").text);
    return fine();
  }
  /// A dict of the pairs that Python 2 hands to an OrderedDict, or Python 3 to a Counter.
  Status filled_dict(NodeId from, uint64_t kind) {
    std::vector<NodeId> flat;
    for (const NodeId pair : out_.items(from)) {
      const auto both = out_.items(pair);
      if (both.size() != 2 || !(out_.is(pair, Kind::kTuple) || out_.is(pair, Kind::kList)))
        return no("makes an OrderedDict of something else than pairs");
      flat.insert(flat.end(), both.begin(), both.end());
    }
    RETURN_IF_ERROR(count_added(flat.size()));
    RETURN_IF_ERROR(push(Kind::kDict, kind));
    if (flat.empty()) return fine();
    out_.lists.push_back(std::move(flat));
    out_.nodes[stack_.back()].length = static_cast<uint32_t>(out_.lists.size());
    return fine();
  }
  Status call(Kind kind) {
    if (!has(2)) return empty();
    const NodeId arguments = pop();
    NodeId callable = pop();
    // The class of a module as torch's old format names it: ("module", class, file, its source).
    const NodeId id = allowed_.opaque ? out_.item(callable, 0) : kNoNode;
    if (out_.is(callable, Kind::kPersistent) && out_.is(id, Kind::kTuple) &&
        out_.is(out_.item(id, 0), Kind::kString) && out_.text(out_.item(id, 0)) == "module")
      callable = out_.item(id, 1);
    // Of an opaque object: a method of it.
    if ((out_.is(callable, Kind::kUnknown) || out_.is(callable, Kind::kOpaque)) &&
        out_.is(arguments, Kind::kTuple))
      return call_unknown(callable, arguments);
    if (!out_.is(callable, Kind::kGlobal) || !out_.is(arguments, Kind::kTuple))
      return no("calls something that is not a global");
    const GlobalRule& rule = *out_.global(callable);
    const bool fits = rule.arguments == nullptr ? rule.object && out_.items(arguments).empty()
                                                : arguments_match(out_, arguments, rule.arguments);
    const bool takes =
        kind == Kind::kObject ? rule.object && fits : rule.arguments != nullptr && fits;
    if (!takes)
      return no("calls " + std::string(rule.module) + "." + std::string(rule.name) +
                " in a way that torch never does; nothing was executed");
    // A member of an enum of an unknown class, or a method of its object: the class is named.
    if (rule.name == "getattr" && allowed_.opaque) {
      RETURN_IF_ERROR(push(Kind::kOpaque, out_.nodes[out_.item(arguments, 0)].data));
      give(stack_.back(), arguments);
      return fine();
    }
    // What is filled later.
    if (kind == Kind::kCall && rule.name == "OrderedDict")
      return filled_dict(out_.item(arguments, 0), 1);
    if (kind == Kind::kCall && rule.name == "defaultdict") {
      note("the defaults of a defaultdict");
      return push(Kind::kDict);
    }
    if (rule.module.starts_with("numpy") && rule.name == "scalar")
      note("the types of numpy's numbers, texts and bytes, which become Python's,");
    if (kind == Kind::kObject && rule.name == "CfgNode")
      return push(Kind::kDict, Pickle::kConfiguration);
    const uint64_t start = out_.pool.size();
    out_.pool.insert(out_.pool.end(), {callable, arguments, kNoNode});
    return push(kind, start);
  }
  /// A frozenset of what lies above the last mark; older protocols call its class.
  Status frozenset() {
    ASSIGN_OR_RETURN(count, unmark());
    RETURN_IF_ERROR(tuple(count));
    const NodeId items = pop();
    RETURN_IF_ERROR(global("builtins", "frozenset"));
    stack_.push_back(items);
    return call(Kind::kCall);
  }
  /// NEWOBJ_EX: an object whose class takes arguments by their names, as none of the allowlist
  /// does.
  Status object_by_names() {
    if (!has(3)) return empty();
    const NodeId named = pop();
    if (!out_.is(named, Kind::kDict)) return no("names arguments by something else than a dict");
    if (!out_.is(stack_[stack_.size() - 2], Kind::kUnknown))
      return no("calls something that takes no arguments by their names");
    RETURN_IF_ERROR(call(Kind::kObject));
    give(stack_.back(), named);
    return count_added(1);
  }
  /// Adds the top n values to the list, set or dict below them.
  Status append(Kind kind, size_t n) {
    if (!has(n + 1)) return empty();
    const NodeId to = stack_[stack_.size() - n - 1];
    Node& target = out_.nodes[to];
    if (target.kind == Kind::kOpaque) {
      for (size_t i = stack_.size() - n; i < stack_.size(); ++i) give(to, stack_[i]);
      stack_.resize(stack_.size() - n);
      return count_added(n);
    }
    if (target.kind != kind) return no("adds to something that is not a list, set or dict");
    if (n > 0) {
      if (target.length == 0) {
        out_.lists.emplace_back();
        target.length = static_cast<uint32_t>(out_.lists.size());
      }
      auto& items = out_.lists[target.length - 1];
      items.insert(items.end(), stack_.end() - static_cast<std::ptrdiff_t>(n), stack_.end());
      stack_.resize(stack_.size() - n);
      return count_added(n);
    }
    return fine();
  }
  /// The number of values above the last mark, which is dropped.
  Result<size_t> unmark() {
    if (marks_.empty()) return no("closes what was not opened");
    const size_t n = stack_.size() - marks_.back();
    marks_.pop_back();
    return n;
  }
  Status put(uint64_t index) {
    if (!has(1)) return no("remembers from an empty stack");
    // Python 2's cPickle counts from 1.
    if (memo_.empty() && index == 1 && out_.protocol <= 2) memo_.push_back(kNoNode);
    if (index != memo_.size()) return no("fills its memo out of order");
    memo_.push_back(stack_.back());
    return fine();
  }
  Status get(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kNoNode)
      return no("recalls a memo entry that was never made");
    stack_.push_back(memo_[index]);
    return fine();
  }
  Status build() {
    if (!has(2)) return empty();
    const NodeId state = pop();
    Node& object = out_.nodes[stack_.back()];
    if (object.kind == Kind::kDict && object.data == 1) {
      object.data = 2 + uint64_t{state};
      return fine();
    }
    if (object.kind == Kind::kDict && object.data == Pickle::kConfiguration) return fine();
    if (object.kind == Kind::kOpaque) {
      give(stack_.back(), state);
      return count_added(1);
    }
    const GlobalRule* rule = out_.global(stack_.back());
    const bool stateful =
        object.kind == Kind::kObject || (object.kind == Kind::kCall && rule->object);
    if (!stateful || out_.pool[object.data + 2] != kNoNode)
      return no("sets the state of something that has none");
    out_.pool[object.data + 2] = state;
    return fine();
  }

  Status step(uint8_t op) {
    uint64_t n = 0;
    switch (op) {
      case 0x80:  // PROTO
        if (at_ != 1 || !number(1, n) || n < 2 || n > 5) return no("has an unknown protocol");
        out_.protocol = static_cast<int>(n);
        return fine();
      case 0x95:  // FRAME
        return number(8, n) && n <= bytes_.size() - at_
                   ? fine()
                   : Status(cut("has a frame longer than the rest"));
      case '(':
        marks_.push_back(stack_.size());
        return fine();
      case 'N':
        return push(Kind::kNone);
      case 0x88:
        return push(Kind::kBool, 1);
      case 0x89:
        return push(Kind::kBool, 0);
      case 'K':
        return integer_of(1, [](uint64_t v) { return static_cast<int64_t>(v); });
      case 'M':
        return integer_of(2, [](uint64_t v) { return static_cast<int64_t>(v); });
      case 'J':
        return integer_of(
            4, [](uint64_t v) { return int64_t{static_cast<int32_t>(static_cast<uint32_t>(v))}; });
      case 0x8a:  // LONG1
        return number(1, n) ? long_integer(n) : Status(cut());
      case 'U':
        return old_text(1);
      case 'T':
        return old_text(4);
      case 'G':  // a big-endian double
        return number(8, n) ? push(Kind::kFloat, __builtin_bswap64(n)) : Status(cut());
      case 0x8c:
        return text(Kind::kString, 1);
      case 'X':
        return text(Kind::kString, 4);
      case 0x8d:
        return text(Kind::kString, 8);
      case 'C':
        return text(Kind::kBytes, 1);
      case 'B':
        return text(Kind::kBytes, 4);
      case '}':
        return push(Kind::kDict);
      case ']':
        return push(Kind::kList);
      case 0x8f:
        return push(Kind::kSet);
      case 0x96:  // BYTEARRAY8: the call that older protocols have in its place
        RETURN_IF_ERROR(global("builtins", "bytearray"));
        RETURN_IF_ERROR(text(Kind::kBytes, 8));
        RETURN_IF_ERROR(tuple(1));
        return call(Kind::kCall);
      case ')':
        return tuple(0);
      case 0x85:
        return tuple(1);
      case 0x86:
        return tuple(2);
      case 0x87:
        return tuple(3);
      case 't': {
        ASSIGN_OR_RETURN(count, unmark());
        return tuple(count);
      }
      case 'a':
        return append(Kind::kList, 1);
      case 'e': {
        ASSIGN_OR_RETURN(count, unmark());
        return append(Kind::kList, count);
      }
      case 0x90: {  // ADDITEMS
        ASSIGN_OR_RETURN(count, unmark());
        return append(Kind::kSet, count);
      }
      case 's':
        return append(Kind::kDict, 2);
      case 'u': {
        ASSIGN_OR_RETURN(count, unmark());
        return count % 2 == 0 ? append(Kind::kDict, count)
                              : Status(no("sets a key without a value"));
      }
      case 'c': {
        std::string_view module, name;
        return line(module) && line(name) ? global(module, name) : Status(cut());
      }
      case 0x93: {  // STACK_GLOBAL
        if (!has(2)) return empty();
        const NodeId name = pop(), module = pop();
        if (!out_.is(name, Kind::kString) || !out_.is(module, Kind::kString))
          return no("names a global by something else than text");
        return global(out_.text(module), out_.text(name));
      }
      case 'R':
        return call(Kind::kCall);
      case 0x81:
        return call(Kind::kObject);
      case 0x91:
        return frozenset();
      case 0x92:
        return object_by_names();
      case 'b':
        return build();
      case 'Q': {
        if (!allowed_.persistent) return no("has a persistent id where none is allowed");
        if (!has(1)) return empty();
        const NodeId id = pop();
        out_.pool.push_back(id);
        return push(Kind::kPersistent, out_.pool.size() - 1);
      }
      case 0x94:  // MEMOIZE: at the number of entries, which a memo from 1 has at another place
        return !memo_.empty() && memo_[0] == kNoNode ? no("numbers its memo in two ways")
                                                     : put(memo_.size());
      case 'q':
        return number(1, n) ? put(n) : Status(cut());
      case 'r':
        return number(4, n) ? put(n) : Status(cut());
      case 'h':
        return number(1, n) ? get(n) : Status(cut());
      case 'j':
        return number(4, n) ? get(n) : Status(cut());
      default:
        return no("has the opcode " + std::to_string(op) + ", which is outside the allowlist");
    }
  }

  std::string_view bytes_;
  const Allowlist& allowed_;
  const std::string& what_;
  PickleLimits limits_;
  size_t at_ = 0;
  uint64_t added_ = 0;
  Pickle out_;
  Given given_;
  std::unordered_map<std::string, uint64_t> unknown_;
  std::vector<NodeId> stack_, memo_;
  std::vector<size_t> marks_;
};

}  // namespace

Result<Pickle> read_pickle(std::string bytes, const Allowlist& allowed, const std::string& what,
                           const PickleLimits& limits) {
  return PickleReader(std::move(bytes), allowed, what, limits).read();
}

}  // namespace lowbit::ckpt
