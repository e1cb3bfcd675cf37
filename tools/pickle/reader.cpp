#include "pickle/reader.h"

#include <cstring>

#include "io/file.h"

namespace lowbit::ckpt {
namespace {

class Reader {
 public:
  Reader(std::string_view bytes, AllowFn allow, const std::string& what, const PickleLimits& limits)
      : bytes_(bytes), allow_(allow), what_(what), limits_(limits) {}

  Result<Pickle> read() {
    if (bytes_.size() > limits_.bytes)
      return no("has more than " + std::to_string(limits_.bytes) + " bytes");
    while (true) {
      uint8_t op;
      if (!byte(op)) return no("ends before its STOP");
      if (op == '.') break;
      if (Status s = step(op); !s.ok()) return s.error();
      if (out_.nodes.size() > limits_.nodes)
        return no("has more than " + std::to_string(limits_.nodes) + " values");
      if (stack_.size() > limits_.stack || marks_.size() > limits_.stack)
        return no("nests or stacks too deep");
    }
    if (at_ != bytes_.size()) return no("has bytes behind its STOP");
    if (stack_.size() != 1 || !marks_.empty()) return no("does not end with exactly one value");
    out_.root = stack_[0];
    return std::move(out_);
  }

 private:
  Error no(const std::string& why) const {
    return bad(what_ + ": the pickle " + why + " (at byte " + std::to_string(at_) + ")");
  }

  bool byte(uint8_t& b) {
    if (at_ >= bytes_.size()) return false;
    b = static_cast<uint8_t>(bytes_[at_++]);
    return true;
  }
  bool number(int width, uint64_t& n) {
    if (bytes_.size() - at_ < static_cast<size_t>(width)) return false;
    n = 0;
    for (int i = 0; i < width; ++i)
      n |= static_cast<uint64_t>(static_cast<uint8_t>(bytes_[at_ + static_cast<size_t>(i)]))
           << (8 * i);
    at_ += static_cast<size_t>(width);
    return true;
  }
  bool take(uint64_t length, std::string_view& text) {
    if (length > bytes_.size() - at_) return false;
    text = bytes_.substr(at_, length);
    at_ += length;
    return true;
  }
  bool line(std::string_view& text) {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) return false;
    text = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return true;
  }

  Status push(Node node) {
    out_.nodes.push_back(std::move(node));
    stack_.push_back(static_cast<NodeId>(out_.nodes.size() - 1));
    return fine();
  }
  Status integer(int64_t value) { return push({.kind = Kind::kInt, .integer = value}); }
  Status text(Kind kind, std::string_view s) {
    return push({.kind = kind, .text = std::string(s)});
  }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  bool has(size_t n) const { return stack_.size() >= floor() + n; }
  NodeId pop() {
    const NodeId id = stack_.back();
    stack_.pop_back();
    return id;
  }
  bool pop_mark(std::vector<NodeId>& items) {
    if (marks_.empty()) return false;
    items.assign(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return true;
  }
  Status tuple(size_t n) {
    if (!has(n)) return no("takes more from the stack than there is");
    Node node{.kind = Kind::kTuple};
    node.items.assign(stack_.end() - static_cast<std::ptrdiff_t>(n), stack_.end());
    stack_.resize(stack_.size() - n);
    return push(std::move(node));
  }
  Status global(std::string_view module, std::string_view name) {
    if (!allow_(module, name)) {
      return no("names " + printable(std::string(module)) + "." + printable(std::string(name)) +
                ", which is outside the allowlist; nothing was executed");
    }
    return text(Kind::kGlobal, std::string(module) + " " + std::string(name));
  }
  Status call(Kind kind) {
    if (!has(2)) return no("takes more from the stack than there is");
    const NodeId arguments = pop(), callable = pop();
    if (out_[callable].kind != Kind::kGlobal || out_[arguments].kind != Kind::kTuple)
      return no("calls something that is not a global");
    Node node{.kind = kind};
    node.items = {callable, arguments};
    return push(std::move(node));
  }
  Status append(const std::vector<NodeId>& items, Kind kind) {
    if (!has(1) || out_[stack_.back()].kind != kind)
      return no("adds to something that is not a list or dict");
    if (kind == Kind::kDict && items.size() % 2 != 0) return no("sets a key without a value");
    auto& target = out_.nodes[stack_.back()].items;
    target.insert(target.end(), items.begin(), items.end());
    return fine();
  }
  Status put(uint64_t index) {
    if (!has(1)) return no("remembers from an empty stack");
    if (index > memo_.size()) return no("skips memo entries");
    if (index == memo_.size()) memo_.push_back(stack_.back());
    memo_[index] = stack_.back();
    return fine();
  }
  Status get(uint64_t index) {
    if (index >= memo_.size()) return no("recalls a memo entry that was never made");
    stack_.push_back(memo_[index]);
    return fine();
  }

  Status step(uint8_t op) {
    uint64_t n = 0;
    std::string_view s, t;
    std::vector<NodeId> items;
    const auto cut = [this] { return no("ends inside a value"); };
    switch (op) {
      case 0x80:
        return number(1, n) && n >= 2 && n <= 5 ? fine() : Status(no("has an unknown protocol"));
      case 0x95:
        return number(8, n) && n <= bytes_.size() - at_
                   ? fine()
                   : Status(no("has a frame longer than the rest"));
      case '(':
        marks_.push_back(stack_.size());
        return fine();
      case 'N':
        return push({});
      case 0x88:
        return push({.kind = Kind::kBool, .integer = 1});
      case 0x89:
        return push({.kind = Kind::kBool});
      case 'K':
        return number(1, n) ? integer(static_cast<int64_t>(n)) : Status(cut());
      case 'M':
        return number(2, n) ? integer(static_cast<int64_t>(n)) : Status(cut());
      case 'J':
        return number(4, n) ? integer(static_cast<int32_t>(static_cast<uint32_t>(n)))
                            : Status(cut());
      case 0x8a: {  // LONG1
        if (!number(1, n) || n > 8 || !take(n, s))
          return no("has an integer of more than 64 bits, or ends inside it");
        int64_t value = n > 0 && static_cast<int8_t>(s[n - 1]) < 0 ? -1 : 0;
        for (size_t i = n; i-- > 0;)
          value =
              static_cast<int64_t>(static_cast<uint64_t>(value) << 8 | static_cast<uint8_t>(s[i]));
        return integer(value);
      }
      case 'G': {  // big-endian double
        if (!take(8, s)) return cut();
        uint64_t bits = 0;
        for (const char c : s) bits = bits << 8 | static_cast<uint8_t>(c);
        double real;
        std::memcpy(&real, &bits, sizeof real);
        return push({.kind = Kind::kFloat, .real = real});
      }
      case 0x8c:
        return number(1, n) && take(n, s) ? text(Kind::kString, s) : Status(cut());
      case 'X':
        return number(4, n) && take(n, s) ? text(Kind::kString, s) : Status(cut());
      case 0x8d:
        return number(8, n) && take(n, s) ? text(Kind::kString, s) : Status(cut());
      case 'C':
        return number(1, n) && take(n, s) ? text(Kind::kBytes, s) : Status(cut());
      case 'B':
        return number(4, n) && take(n, s) ? text(Kind::kBytes, s) : Status(cut());
      case '}':
        return push({.kind = Kind::kDict});
      case ']':
        return push({.kind = Kind::kList});
      case ')':
        return push({.kind = Kind::kTuple});
      case 0x85:
        return tuple(1);
      case 0x86:
        return tuple(2);
      case 0x87:
        return tuple(3);
      case 't': {
        Node node{.kind = Kind::kTuple};
        if (!pop_mark(node.items)) return no("closes a tuple that was not opened");
        return push(std::move(node));
      }
      case 'a': {
        if (!has(2)) return no("takes more from the stack than there is");
        items = {pop()};
        return append(items, Kind::kList);
      }
      case 'e':
        return pop_mark(items) ? append(items, Kind::kList)
                               : Status(no("closes a list that was not opened"));
      case 's': {
        if (!has(3)) return no("takes more from the stack than there is");
        const NodeId value = pop(), key = pop();
        items = {key, value};
        return append(items, Kind::kDict);
      }
      case 'u':
        return pop_mark(items) ? append(items, Kind::kDict)
                               : Status(no("closes a dict that was not opened"));
      case 'c':
        return line(s) && line(t) ? global(s, t) : Status(cut());
      case 0x93: {  // STACK_GLOBAL
        if (!has(2)) return no("takes more from the stack than there is");
        const NodeId name = pop(), module = pop();
        if (out_[name].kind != Kind::kString || out_[module].kind != Kind::kString)
          return no("names a global by something else than text");
        const std::string m = out_[module].text, g = out_[name].text;
        return global(m, g);
      }
      case 'R':
        return call(Kind::kCall);
      case 0x81:
        return call(Kind::kObject);
      case 'b': {  // BUILD: the state of an object that was made here
        if (!has(2)) return no("takes more from the stack than there is");
        const NodeId state = pop();
        Node& object = out_.nodes[stack_.back()];
        if ((object.kind != Kind::kObject && object.kind != Kind::kCall) ||
            object.items.size() != 2)
          return no("sets the state of something that has none");
        object.items.push_back(state);
        return fine();
      }
      case 'Q': {
        if (!has(1)) return no("takes more from the stack than there is");
        Node node{.kind = Kind::kPersistent};
        node.items = {pop()};
        return push(std::move(node));
      }
      case 0x94:
        return put(memo_.size());
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
  AllowFn allow_;
  const std::string& what_;
  PickleLimits limits_;
  size_t at_ = 0;
  Pickle out_;
  std::vector<NodeId> stack_, memo_;
  std::vector<size_t> marks_;
};

}  // namespace

Result<Pickle> read_pickle(std::string_view bytes, AllowFn allow, const std::string& what,
                           const PickleLimits& limits) {
  return Reader(bytes, allow, what, limits).read();
}

}  // namespace lowbit::ckpt
