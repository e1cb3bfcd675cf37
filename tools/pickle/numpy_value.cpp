#include "pickle/numpy_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

namespace lowbit::ckpt {
namespace {

/// A half-precision number by its bits.
double half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

/// An integer of 8 bytes without a sign.
Value unsigned_number(uint64_t n) {
  if (n <= INT64_MAX) return Value::number(static_cast<int64_t>(n));
  Value out{.kind = Value::Kind::kLong, .text = std::string(9, '\0')};
  std::memcpy(out.text.data(), &n, sizeof n);
  return out;
}

bool has_arrays_alone(const Value& v) {
  return v.is(Value::Kind::kOpaque) ? v.integer == Value::kArray
                                    : std::ranges::all_of(v.items, has_arrays_alone);
}

/// UTF-32 as UTF-8; none where it is not text.
std::optional<std::string> utf8_of(std::string_view utf32) {
  std::string out;
  for (size_t i = 0; i + 4 <= utf32.size(); i += 4) {
    uint32_t c = 0;
    std::memcpy(&c, utf32.data() + i, sizeof c);
    if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return std::nullopt;
    if (c < 0x80) {
      out += static_cast<char>(c);
      continue;
    }
    const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    out += static_cast<char>(0xf0 << (3 - more) | c >> 6 * more);
    for (int k = more - 1; k >= 0; --k) out += static_cast<char>(0x80 | (c >> 6 * k & 0x3f));
  }
  return out;
}

}  // namespace

uint64_t numpy_width(std::string_view code) {
  constexpr std::string_view kCodes[] = {"b1", "i1", "i2", "i4", "i8", "u1", "u2",
                                         "u4", "u8", "f2", "f4", "f8", "c8", "c16"};
  if (std::ranges::find(kCodes, code) == std::end(kCodes)) return 0;
  return code == "c16" ? 16 : static_cast<uint64_t>(code[1] - '0');
}

std::string numpy_dtype(const std::string& code) {
  if (numpy_width(code) == 0 || code == "b1") return code == "b1" ? "bool" : "";
  const char* name = code[0] == 'f'   ? "float"
                     : code[0] == 'i' ? "int"
                     : code[0] == 'c' ? "complex"
                                      : "uint";
  return name + std::to_string(8 * numpy_width(code));
}

std::optional<NumpyArray> numpy_array(const Pickle& p, NodeId node) {
  const GlobalRule* rule = p.is(node, Kind::kCall) ? p.global(node) : nullptr;
  if (rule == nullptr || rule->name != "_reconstruct") return std::nullopt;
  const GlobalRule* cls = p.global(p.item(p.item(node, 1), 0));
  // (version, shape, dtype, column-major, content)
  const NodeId state = p.item(node, 2), dtype = p.item(state, 2), columns = p.item(state, 3);
  const GlobalRule* type = p.is(dtype, Kind::kCall) ? p.global(dtype) : nullptr;
  if (cls == nullptr || cls->name != "ndarray" || type == nullptr || type->name != "dtype" ||
      !p.is(state, Kind::kTuple) || p.items(state).size() != 5 || !p.is(columns, Kind::kBool))
    return std::nullopt;
  const NodeId order = p.item(p.item(dtype, 2), 1), sizes = p.item(state, 1);
  if ((p.is(order, Kind::kString) && p.text(order) == ">") || !p.is(sizes, Kind::kTuple) ||
      p.items(sizes).size() > 32)
    return std::nullopt;
  NumpyArray out;
  out.module = std::string(rule->module);
  out.code = std::string(p.text(p.item(p.item(dtype, 1), 0)));
  out.columns = p.integer(columns) != 0;
  out.content = p.item(state, 4);
  out.bytes = numpy_width(out.code);
  if (out.bytes == 0) return std::nullopt;
  for (const NodeId size : p.items(sizes)) {
    if (!p.is(size, Kind::kInt) || p.integer(size) < 0) return std::nullopt;
    out.shape.push_back(p.integer(size));
    const auto n = static_cast<uint64_t>(p.integer(size));
    if (n != 0 && out.bytes > (uint64_t{1} << 40) / n) return std::nullopt;
    out.bytes *= n;
  }
  return out;
}

Value array_value(const NumpyArray& array, std::string name, std::string content) {
  Value shape = Value::tuple({});
  for (const int64_t size : array.shape) shape.items.push_back(Value::number(size));
  Value out{.kind = Value::Kind::kOpaque, .integer = Value::kArray, .text = std::move(name)};
  out.items = {Value::words(array.module), Value::words(array.code), std::move(shape),
               Value::boolean(array.columns),
               Value{.kind = Value::Kind::kBytes, .text = std::move(content)}};
  return out;
}

void write_dtype(PickleWriter& to, const std::string& code) {
  to.global("numpy", "dtype").text(code).boolean(false).boolean(true).tuple(3).put().call().put();
  to.mark().integer(3).text(code.ends_with('1') ? "|" : "<").none().none().none();
  to.integer(-1).integer(-1).integer(0).tuple(8).put().build();
}

void write_array(PickleWriter& to, const Value& v) {
  const std::string& code = v.items[1].text;
  to.global(v.items[0].text, "_reconstruct").global("numpy", "ndarray").integer(0).tuple(1).put();
  to.bytes("b").tuple(3).put().call().put().mark().integer(1);
  write_value(to, v.items[2]);
  write_dtype(to, code);
  to.boolean(v.items[3].integer != 0).bytes(v.items[4].text).tuple(5).put().build();
}

Value numpy_text(const std::string& code, const std::string& bytes) {
  // It is padded with zeros to the length that the code says, and numpy drops them all.
  const size_t unit = code[0] == 'U' ? 4 : 1;
  size_t length = bytes.size();
  uint64_t said = 0;
  const char* code_end = code.data() + code.size();
  const auto [end, error] = std::from_chars(code.data() + 1, code_end, said);
  if (error != std::errc() || end != code_end || length % unit != 0 || length / unit != said)
    return Value::none();
  while (length > 0 && bytes.substr(length - unit, unit) == std::string(unit, '\0')) length -= unit;
  if (unit == 1) return Value{.kind = Value::Kind::kBytes, .text = bytes.substr(0, length)};
  const auto text = utf8_of(std::string_view(bytes).substr(0, length));
  return text ? Value::words(*text) : Value::none();
}

Value numpy_number(const std::string& dtype, const std::string& bytes) {
  const auto as = [&]<class T>(T x) {
    if (bytes.size() == sizeof x) std::memcpy(&x, bytes.data(), sizeof x);
    return x;
  };
  const size_t digits = dtype.find_first_of("123468");
  const size_t width = dtype == "bool"               ? 1
                       : digits == std::string::npos ? 0
                                                     : std::stoul(dtype.substr(digits)) / 8;
  if (width == 0 || bytes.size() != width) return Value::none();
  if (dtype == "bool") return Value::boolean(as(uint8_t{}) != 0);
  if (dtype.starts_with("complex")) {
    const std::string part = "float" + std::to_string(4 * width);
    Value out{.kind = Value::Kind::kComplex};
    for (const size_t at : {size_t{0}, width / 2})
      out.items.push_back(numpy_number(part, bytes.substr(at, width / 2)));
    return out;
  }
  if (dtype == "float64") return Value::floating(as(double{}));
  if (dtype == "float32") return Value::floating(static_cast<double>(as(float{})));
  if (dtype == "float16") return Value::floating(half(as(uint16_t{})));
  if (dtype == "int8") return Value::number(as(int8_t{}));
  if (dtype == "int16") return Value::number(as(int16_t{}));
  if (dtype == "int32") return Value::number(as(int32_t{}));
  if (dtype == "int64") return Value::number(as(int64_t{}));
  if (dtype == "uint8") return Value::number(as(uint8_t{}));
  if (dtype == "uint16") return Value::number(as(uint16_t{}));
  if (dtype == "uint32") return Value::number(as(uint32_t{}));
  return unsigned_number(as(uint64_t{}));
}

Value with_numbers(Value value) {
  if (value.is(Value::Kind::kOpaque)) {
    if (value.integer != Value::kArray || !value.items[2].items.empty()) return value;
    // No setting is complex.
    const std::string dtype = numpy_dtype(value.items[1].text);
    if (dtype.starts_with("complex")) return value;
    Value number = numpy_number(dtype, value.items[4].text);
    return number.is(Value::Kind::kNone) ? value : number;
  }
  for (Value& item : value.items) item = with_numbers(std::move(item));
  return value;
}

bool Value::is_writable() const { return is_opaque() && has_arrays_alone(*this); }

}  // namespace lowbit::ckpt
