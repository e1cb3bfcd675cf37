// The catalog as JSON, for those who are not compiled with it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lowbit {

namespace json {

using Fields = std::vector<std::pair<std::string, std::string>>;  // a name, and JSON

std::string text(std::string_view s);  // names only: nothing is escaped
std::string flag(bool b);
std::string object(const Fields& fields);
std::string array(const std::vector<std::string>& items);

}  // namespace json

/// What is registered: "state": [...], "rules": [...], "param": [...].
json::Fields catalog_fields();

}  // namespace lowbit
