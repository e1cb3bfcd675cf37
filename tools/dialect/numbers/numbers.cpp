#include "dialect/numbers/numbers.h"

#include <charconv>
#include <cmath>
#include <cstring>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "io/text.h"

namespace lowbit::ckpt {

Result<Value> number_of(const Leaf& leaf) {
  if (leaf.kind == Leaf::Kind::kValue) return leaf.value;
  if (leaf.kind != Leaf::Kind::kTensor || leaf.source == nullptr || volume(leaf.shape) != 1)
    return bad(printable(leaf.name()) + ": is not a number");
  char bytes[16] = {};
  RETURN_IF_ERROR(leaf.source->read(0, 1, bytes));
  const std::string_view dtype = leaf.dtype->name;
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, bytes, sizeof x);
    return x;
  };
  if (dtype == "float32") return Value::floating(static_cast<double>(as(float{})));
  if (dtype == "float64") return Value::floating(as(double{}));
  if (dtype == "bfloat16")
    return Value::floating(static_cast<double>(bfloat16_to_float(as(uint16_t{}))));
  if (dtype == "float16")
    return Value::floating(static_cast<double>(half_to_float(as(uint16_t{}))));
  if (dtype == "int64") return Value::number(as(int64_t{}));
  if (dtype == "int32") return Value::number(as(int32_t{}));
  if (dtype == "int16") return Value::number(as(int16_t{}));
  if (dtype == "int8") return Value::number(as(int8_t{}));
  if (dtype == "uint8") return Value::number(as(uint8_t{}));
  if (dtype == "bool") return Value::boolean(as(uint8_t{}) != 0);
  return bad(printable(leaf.name()) + ": is a number of dtype " + std::string(dtype));
}

Result<double> real_of(const Value& value, const std::string& what) {
  if (value.is(Value::Kind::kFloat)) return value.real;
  if (value.is(Value::Kind::kInt) || value.is(Value::Kind::kBool))
    return static_cast<double>(value.integer);
  return bad(what + ": is not a number");
}

Result<int64_t> whole_of(const Value& value, const std::string& what) {
  ASSIGN_OR_RETURN(real, real_of(value, what));
  constexpr double kMax = 9007199254740992.0;  // 2^53
  if (!(real >= -kMax && real <= kMax) || real != std::trunc(real))
    return bad(what + ": " + std::to_string(real) + " is not a whole number");
  return static_cast<int64_t>(real);
}

Result<double> steps_of(const Value& value, const std::string& what) {
  ASSIGN_OR_RETURN(steps, real_of(value, what));
  if (!(steps >= 0) || steps != std::trunc(steps) || std::isinf(steps))
    return bad(what + ": " + std::to_string(steps) + " counts no steps");
  return steps;
}

const Value* number_in(const Param& param, std::string_view name) {
  return setting(param.numbers, name);
}

std::string value_text(const Value& value) {
  if (value.is(Value::Kind::kNone)) return "None";
  if (value.is(Value::Kind::kBool)) return value.integer != 0 ? "True" : "False";
  if (value.is(Value::Kind::kInt)) return std::to_string(value.integer);
  if (value.is(Value::Kind::kText)) return "'" + printable(value.text) + "'";
  if (value.is(Value::Kind::kTuple) || value.is(Value::Kind::kList)) {
    std::string out;
    for (const Value& item : value.items) out += (out.empty() ? "" : ", ") + value_text(item);
    return "(" + out + ")";
  }
  if (!value.is(Value::Kind::kFloat)) return "another value";
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value.real).ptr;
  std::string out(text, end);
  return out.find_first_of(".en") == std::string::npos ? out + ".0" : out;
}

}  // namespace lowbit::ckpt
