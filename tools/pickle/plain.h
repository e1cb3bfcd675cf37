// Plain Python values: what a checkpoint holds besides tensors, such as the settings of a group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"
#include "pickle/value.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {

/// One Python value, nested at most kMaxDepth deep.
struct Value {
  enum class Kind : uint8_t {
    kNone,
    kBool,       // integer
    kInt,        // integer
    kFloat,      // real
    kText,       // text
    kBytes,      // text
    kList,       // items
    kTuple,      // items
    kDict,       // items: key, value, key, value
    kOrdered,    // the same, an OrderedDict
    kGlobal,     // text: "module name" of a dtype, a layout, ..., which writers may write again
    kDevice,     // text: "cpu", "cuda:0"
    kSize,       // items, integers: torch.Size
    kSet,        // items
    kComplex,    // items: real and imaginary part, floats
    kBytearray,  // text
    kLong,       // text: an integer of more than 64 bits, little-endian in two's complement
    kOpaque,     // text: the class of an object that is not looked at, "argparse.Namespace";
                 // items, of DeepSpeed's fragment_address: numel and start; of its
                 // DynamicLossScaler: a dict of its attributes;
                 // of an array of numpy: what it consists of; integer: kTensor, ... below
  };
  static constexpr int kMaxDepth = 100;
  /// What `integer` says of a kOpaque: a tensor that is not read (text is its kind), an array of
  /// numpy that can be written again, an object that holds tensors, in its attributes too, one that
  /// a writer made of a dict of attributes, which no reader gives, and an array of numbers that
  /// cannot be written again.
  enum Opaque : uint8_t { kObject, kTensor, kArray, kHolder, kMade, kUnreadArray };
  /// The text of a kDict that is a yacs CfgNode.
  static constexpr const char* kConfiguration = "yacs.config CfgNode";
  /// The text of a kDict that is a Counter.
  static constexpr const char* kCounter = "collections Counter";

  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double real = 0;
  std::string text = {};
  std::vector<Value> items = {};

  static Value none() { return {}; }
  static Value boolean(bool b) { return {.kind = Kind::kBool, .integer = b}; }
  static Value number(int64_t n) { return {.kind = Kind::kInt, .integer = n}; }
  static Value floating(double x) { return {.kind = Kind::kFloat, .real = x}; }
  static Value words(std::string s) { return {.kind = Kind::kText, .text = std::move(s)}; }
  static Value unread_tensor(std::string kind) {
    return {.kind = Kind::kOpaque, .integer = kTensor, .text = std::move(kind)};
  }
  static Value list(std::vector<Value> v) { return {.kind = Kind::kList, .items = std::move(v)}; }
  static Value tuple(std::vector<Value> v) { return {.kind = Kind::kTuple, .items = std::move(v)}; }

  bool is(Kind k) const { return kind == k; }
  /// Whether it is True, or a number that is not 0.
  bool is_on() const {
    return is(Kind::kFloat) ? real != 0 : (is(Kind::kBool) || is(Kind::kInt)) && integer != 0;
  }
  /// Whether it is an opaque object, or holds one. Only arrays of numpy among them can be written.
  bool is_opaque() const;
  /// Whether it is opaque by arrays of numpy alone.
  bool is_writable() const;
  /// Whether it is a tensor that is not read: a leaf of its own, "a sparse tensor".
  bool is_unread_tensor() const { return kind == Kind::kOpaque && integer == kTensor; }
  /// Whether one of its opaque objects is a tensor or holds one: data that nothing else has.
  bool holds_tensor() const;
  /// The same of an array of numbers: a list of weights may be one of numpy's.
  bool holds_array() const;
  /// How many values it is, with all inside it.
  uint64_t count() const;
  /// Whether it is a list, a tuple or a torch.Size.
  bool is_row() const { return is(Kind::kList) || is(Kind::kTuple) || is(Kind::kSize); }
  bool is_dict() const { return kind == Kind::kDict || kind == Kind::kOrdered; }
  /// The value of a text key of a dict; null if the dict has no such key.
  const Value* find(std::string_view key) const;
  /// Adds a text key to a dict, or replaces its value.
  void set(std::string_view key, Value value);
  bool operator==(const Value&) const = default;
};

/// Whether torch has a layout of that name: "strided", "sparse_coo", ...
bool is_layout(std::string_view name);
/// The classes of the opaque objects in a value, each once: "argparse.Namespace, a.B".
std::string opaque_names(const Value& value);
/// A kLong as people and Python's int(text, 16) read it: "-0x1f...".
std::string hexadecimal(const Value& value);
/// The most values that a pickle may unfold to, whoever reads it.
constexpr uint64_t kMaxPlainValues = 1u << 22;
/// The bytes that the values of one pickle may have together: references to a long text or to an
/// array, which cost two bytes each, must not fill the memory.
struct PickleBudget {
  uint64_t text, arrays;
  static PickleBudget of(const Pickle& pickle) {
    const uint64_t bytes = pickle.bytes.size();
    return {std::min<uint64_t>((16u << 20) + 32 * bytes, 1u << 30), (1u << 20) + 4 * bytes};
  }
  /// Takes the bytes of a text from what is left.
  Status spend_text(uint64_t bytes, const std::string& what);
};
/// Whether Python takes the value at a node as a key or in a set; false also where `left` values do
/// not suffice to tell.
bool hashable(const Pickle& pickle, NodeId node, uint64_t& left, int depth);
/// How many values the pickle of an input of `bytes` bytes may unfold to: all that it stores, and
/// some more. A value that it stores once and refers to often must not expand without limit.
uint64_t value_limit(const Pickle& pickle, uint64_t bytes);
/// The plain value at a node. An error if it is not a plain value, is nested too deep, repeats a
/// key, or expands to more than `limit` values or more text than `budget` has; arrays of numpy that
/// it has no room for are named and stay opaque. `what` names the input in errors.
Result<Value> plain_value(const Pickle& pickle, NodeId node, const std::string& what,
                          uint64_t limit, PickleBudget& budget);
/// The same of a pickle of which nothing else is read.
Result<Value> plain_value(const Pickle& pickle, NodeId node, const std::string& what,
                          uint64_t limit = 1u << 19);
/// Writes a value with the opcodes of protocol 2, with the batches and the memo of Python's
/// pickler.
void write_value(PickleWriter& to, const Value& value);
/// Fill the empty list or dict written before: `item(i)` writes item i, `entry(i)` key and value i.
void write_items(PickleWriter& to, size_t count, const std::function<void(size_t)>& item);
void write_entries(PickleWriter& to, size_t count, bool ordered,
                   const std::function<void(size_t)>& entry);

}  // namespace lowbit::ckpt
