#include "python/errors.h"

namespace lowbit::ckpt::python {
namespace {

struct Kept {
  PyObject *type, *value, *traceback;
};
// Plain pointers: a thread that ends without the GIL frees no object.
thread_local Kept kept_raised = {nullptr, nullptr, nullptr};

/// An option of the command line, and what it is called here; a flag is "force=True".
struct Word {
  std::string_view option, here;
};
constexpr Word kWords[] = {
    {"block", "block="},
    {"bytes", "bytes=True"},
    {"container", "container="},
    {"digest", "digest=True"},
    {"dry-run", "dry_run=True"},
    {"exclude", "exclude="},
    {"force", "force=True"},
    {"from", "from_dialect="},
    {"full-precision", "full_precision="},
    {"group", "group="},
    {"health", "health=True"},
    {"include", "include="},
    {"keep", "keep=True"},
    {"lossy", "lossy=True"},
    {"memory-limit", "memory_limit="},
    {"mesh", "mesh="},
    {"model", "model="},
    {"no-values", "finite=False"},
    {"opaque", "opaque=True"},
    {"optimizer", "optimizer="},
    {"part", "part="},
    {"requantize", "requantize=True"},
    {"seed", "seed="},
    {"state-format", "state_format="},
    {"threads", "threads="},
    {"to", "to="},
    {"tolerance", "tolerance="},
    {"weights", "weights="},
    {"world-size", "world_size="},
};

bool is_lower(char c) { return c == '-' || (c >= 'a' && c <= 'z'); }
bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }

const char* cause_name(Cause cause) {
  switch (cause) {
    case Cause::kDamaged:
      return "damaged";
    case Cause::kTooLarge:
      return "too large";
    case Cause::kOther:
      break;
  }
  return "";
}

}  // namespace

std::string in_python(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 2;
    while (end < text.size() && is_lower(text[end])) ++end;
    const Word* word = nullptr;
    const bool option =
        text.compare(at, 2, "--") == 0 && (at == 0 || text[at - 1] == ' ' || text[at - 1] == '(');
    for (const Word& w : kWords) {
      if (option && text.compare(at + 2, end - at - 2, w.option) == 0) word = &w;
    }
    if (word == nullptr) {
      out += text[at++];
      continue;
    }
    out += word->here;
    at = end;
    if (!out.ends_with('=') || at + 2 >= text.size() || text[at] != ' ') continue;
    const bool value = is_upper(text[at + 1]) && is_upper(text[at + 2]);  // what stands for one
    if (value || text[at + 1] == '\'') ++at;
    for (const char* name : {"torch", "lowbit", "dcp", "safetensors", "universal", "float32"}) {
      const std::string value = std::string(" ") + name;
      const size_t after = at + value.size();
      if (text.compare(at, value.size(), value) != 0) continue;
      if (after < text.size() && (is_lower(text[after]) || text[after] == '_')) continue;
      out += std::string("'") + name + "'";
      at = after;
      break;
    }
  }
  return out;
}

void keep_raised() {
  Kept now{};
  PyErr_Fetch(&now.type, &now.value, &now.traceback);
  if (kept_raised.type == nullptr) {
    kept_raised = now;
    return;
  }
  Py_XDECREF(now.type);
  Py_XDECREF(now.value);
  Py_XDECREF(now.traceback);
}

void raise_kept() {
  if (kept_raised.type == nullptr) return;
  const Kept now = std::exchange(kept_raised, {});
  PyErr_Restore(now.type, now.value, now.traceback);
  throw Raised();
}

void raise(const Error& error) {
  const Object module(PyImport_ImportModule("lowbit.checkpoint"));
  const Object type(PyObject_GetAttrString(module.get(), "CheckpointError"));
  const Object said = tuple_of(
      message(in_python(error.text)), integer(static_cast<int>(error.code)), message(error.file),
      message(error.item), message(error.tensor), text(cause_name(error.cause)));
  const Object made(PyObject_CallObject(type.get(), said.get()));
  PyErr_SetObject(type.get(), made.get());
  throw Raised();
}

void raise(PyObject* type, const std::string& text) {
  PyErr_SetObject(type, message(text).get());
  throw Raised();
}

}  // namespace lowbit::ckpt::python
