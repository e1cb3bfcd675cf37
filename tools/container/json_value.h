// JSON from files, as plain values: no duplicate keys, no floats, nothing deep, nothing large.
#pragma once

#include <string>
#include <string_view>

#include "io/status.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

/// null, booleans, integers of 64 bits, text, lists, dicts by text; anything else is an error. At
/// most `most` values.
Result<Value> parse_json(std::string_view text, uint64_t most, const std::string& what);
/// The same kinds of values, compact; text must be UTF-8.
std::string json_text(const Value& value);

}  // namespace lowbit::ckpt
