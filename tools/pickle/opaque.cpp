#include "pickle/opaque.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

constexpr size_t kMaxName = 200;

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

/// Calls `use` with each part of a dotted name, until it returns false.
template <class Use>
bool for_parts(std::string_view dotted, const Use& use) {
  for (size_t at = 0;;) {
    const size_t dot = std::min(dotted.find('.', at), dotted.size());
    if (!use(dotted.substr(at, dot - at))) return false;
    if (dot == dotted.size()) return true;
    at = dot + 1;
  }
}

/// Types that hold nothing, such as the factory of a defaultdict.
bool is_plain_type(std::string_view name) {
  return is_one_of(name, {"object", "frozenset", "slice", "range", "type", "int", "long", "float",
                          "str", "unicode", "list", "dict", "set", "tuple", "bool"});
}

bool is_builtins(std::string_view module) {
  return module == "builtins" || module == "__builtin__";
}

}  // namespace

bool may_be_named(std::string_view module, std::string_view name) {
  if (module.size() + name.size() > kMaxName) return false;
  if (is_builtins(module)) return is_plain_type(name);
  const auto ordinary = [](std::string_view part) {
    return !part.empty() && is_letter(part[0]) &&
           std::all_of(part.begin(), part.end(),
                       [](char c) { return is_letter(c) || (c >= '0' && c <= '9'); }) &&
           !is_one_of(part, {"os", "posix", "nt", "subprocess", "sys", "builtins", "__builtin__",
                             "ctypes", "importlib", "socket", "shutil", "pty", "runpy", "pickle",
                             "_pickle", "cPickle", "marshal", "commands", "webbrowser"});
  };
  return for_parts(module, ordinary) && for_parts(name, ordinary);
}

bool is_constructor(std::string_view module, std::string_view name) {
  if (is_builtins(module)) return is_plain_type(name);
  const std::string_view top = module.substr(0, module.find('.'));
  if (is_one_of(top, {"numpy", "datetime", "copyreg", "copy_reg", "decimal", "uuid"})) return true;
  const size_t dot = name.rfind('.');
  std::string_view last = dot == std::string_view::npos ? name : name.substr(dot + 1);
  while (!last.empty() && last[0] == '_') last.remove_prefix(1);
  return !last.empty() && last[0] >= 'A' && last[0] <= 'Z';
}

}  // namespace lowbit::ckpt
