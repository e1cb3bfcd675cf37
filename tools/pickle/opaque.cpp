#include "pickle/opaque.h"

#include <algorithm>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr size_t kMaxName = 200;

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

/// Types and functions that reach nothing: the factory of a defaultdict, the rule of a schedule.
bool is_plain_builtin(std::string_view name) {
  return is_one_of(name,
                   {"object", "frozenset", "slice",     "range", "xrange",   "type",
                    "int",    "long",      "float",     "str",   "unicode",  "list",
                    "dict",   "set",       "tuple",     "bool",  "abs",      "all",
                    "any",    "divmod",    "enumerate", "hash",  "id",       "iter",
                    "len",    "max",       "min",       "pow",   "repr",     "reversed",
                    "round",  "sorted",    "sum",       "zip",   "Ellipsis", "NotImplemented"});
}

bool is_builtins(std::string_view module) {
  return module == "builtins" || module == "__builtin__";
}

}  // namespace

bool may_be_named(std::string_view module, std::string_view name) {
  if (module.size() + name.size() > kMaxName) return false;
  if (is_builtins(module)) return is_plain_builtin(name);
  // Where numpy makes its random generators, and no pickle module.
  if (module == "numpy.random._pickle") module = "numpy.random";
  const auto ordinary = [](std::string_view part) {
    return !part.empty() && is_letter(part[0]) &&
           std::ranges::all_of(part,
                               [](char c) { return is_letter(c) || (c >= '0' && c <= '9'); }) &&
           !is_one_of(part, {"os", "posix", "nt", "subprocess", "sys", "builtins", "__builtin__",
                             "ctypes", "importlib", "socket", "shutil", "pty", "runpy", "pickle",
                             "_pickle", "cPickle", "marshal", "commands", "webbrowser"});
  };
  return for_parts(module, ordinary) && for_parts(name, ordinary);
}

}  // namespace lowbit::ckpt
