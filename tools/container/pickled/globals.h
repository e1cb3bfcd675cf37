// The Python globals that a checkpoint's pickles may name. Every other global is an error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "pickle/reader.h"

namespace lowbit::ckpt {

/// The globals of plain values: torch's dtypes, Size and device, OrderedDict, set.
const std::vector<GlobalRule>& plain_globals();
/// The globals of tensors, of the wrappers around them, and of plain values.
const Allowlist& tensor_globals();

/// The same in a whole file of torch.save, where objects of other classes are named and stay
/// unread.
const Allowlist& tree_globals();

/// What kind of tensor `function` rebuilds ("a sparse tensor") if it has no dense elements, and is
/// refused; null for any other function.
const char* refused_kind(std::string_view function);
/// Whether `cls` ("module.Name") is a tensor subclass that this tool reads and writes.
bool is_known_subclass(const std::string& cls);

}  // namespace lowbit::ckpt
