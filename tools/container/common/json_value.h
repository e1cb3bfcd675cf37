// JSON from files, as plain values, without duplicate keys or floats, in limited depth and size.
#pragma once

#include <string>
#include <string_view>

#include "io/status.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

/// Parses null, booleans, 64-bit integers, text, lists and dicts; anything else is an error, and so
/// are more than `limit` values.
Result<Value> parse_json(std::string_view text, uint64_t limit, const std::string& what);
/// Writes such a value compactly; an error where parse_json would not read it. Text must be UTF-8.
Result<std::string> json_text(const Value& value, uint64_t limit, const std::string& what);

}  // namespace lowbit::ckpt
