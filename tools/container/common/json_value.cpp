#include "container/common/json_value.h"

#include <nlohmann/json.hpp>
#include <set>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// Builds the value as the parser goes. Where a function returns false, the parser stops.
class Builder {
 public:
  explicit Builder(uint64_t limit) : left_(limit) {}

  bool null() { return add(Value::none()); }
  bool boolean(bool b) { return add(Value::boolean(b)); }
  bool number_integer(int64_t n) {
    // JSON accepts "-0" as a number, but it is not a size.
    return n < 0 ? add(Value::number(n)) : no("has a number written as -0");
  }
  bool number_unsigned(uint64_t n) {
    return n <= INT64_MAX ? add(Value::number(static_cast<int64_t>(n)))
                          : no("has a number beyond 63 bits");
  }
  bool number_float(double, const std::string& text) {
    return no("has the number " + printable(text) + ", which is not a whole one");
  }
  bool string(std::string& text) { return add(Value::words(std::move(text))); }
  bool binary(std::vector<uint8_t>&) { return no("has binary data"); }
  bool start_object(size_t) { return open(Value::Kind::kDict); }
  bool start_array(size_t) { return open(Value::Kind::kList); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& text) {
    if (!keys_.back().insert(text).second) return no("has the key " + printable(text) + " twice");
    return add(Value::words(std::move(text)));
  }
  template <class Exception>
  bool parse_error(size_t at, const std::string&, const Exception&) {
    return no("is not JSON at byte " + std::to_string(at));
  }

  const std::string& why() const { return why_; }
  Value take() { return std::move(root_); }

 private:
  bool no(std::string why) {
    if (why_.empty()) why_ = std::move(why);
    return false;
  }
  bool add(Value value) {
    if (left_ == 0) return no("has too many values");
    --left_;
    if (open_.empty()) {
      root_ = std::move(value);
    } else {
      open_.back().items.push_back(std::move(value));
    }
    return true;
  }
  bool open(Value::Kind kind) {
    if (open_.size() >= Value::kMaxDepth) return no("is nested too deep");
    open_.push_back(Value{.kind = kind});
    keys_.emplace_back();
    return true;
  }
  bool close() {
    Value value = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    return add(std::move(value));
  }

  uint64_t left_;
  std::vector<Value> open_;
  std::vector<std::set<std::string>> keys_;
  Value root_;
  std::string why_;
};

nlohmann::json json_of(const Value& v) {
  switch (v.kind) {
    case Value::Kind::kNone:
      return nullptr;
    case Value::Kind::kBool:
      return v.integer != 0;
    case Value::Kind::kInt:
      return v.integer;
    case Value::Kind::kText:
      return v.text;
    default:
      return nullptr;
  }
}

/// Writes a value, and keeps to the limits of Builder.
class JsonWriter {
 public:
  JsonWriter(uint64_t limit, const std::string& what) : left_(limit), what_(what) {}

  Status append(const Value& v, int depth) {
    if (left_ == 0) return too_large(what_ + ": its JSON would have too many values");
    --left_;
    const bool list = v.is(Value::Kind::kList);
    if (!list && !v.is_dict()) {
      out += json_of(v).dump();
      return fine();
    }
    if (depth >= Value::kMaxDepth) return too_large(what_ + ": its JSON would be nested too deep");
    out += list ? '[' : '{';
    for (size_t i = 0; i < v.items.size(); ++i) {
      if (i > 0) out += list || i % 2 == 0 ? ',' : ':';
      RETURN_IF_ERROR(append(v.items[i], depth + 1));
    }
    out += list ? ']' : '}';
    return fine();
  }
  std::string out;

 private:
  uint64_t left_;
  const std::string& what_;
};

}  // namespace

Result<Value> parse_json(std::string_view text, uint64_t limit, const std::string& what) {
  // Bytes that the parser would take for the end of the text, or skip.
  if (text.find('\0') != std::string_view::npos) return bad(what + ": has a zero byte in its JSON");
  if (text.starts_with("\xef\xbb\xbf"))
    return bad(what + ": its JSON starts with a byte order mark");
  Builder builder(limit);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder))
    return bad(what + ": its JSON " + builder.why());
  return builder.take();
}

Result<std::string> json_text(const Value& value, uint64_t limit, const std::string& what) {
  JsonWriter writer(limit, what);
  RETURN_IF_ERROR(writer.append(value, 0));
  return std::move(writer.out);
}

}  // namespace lowbit::ckpt
