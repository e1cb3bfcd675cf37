// Text from files: whether it is UTF-8, and how to print it so that a terminal stays what it was.
#pragma once

#include <string>
#include <string_view>

namespace lowbit::ckpt {

/// Whether `text` is UTF-8. Lone surrogates are let through where asked: Python's pickles hold
/// them ("surrogatepass").
bool is_utf8(std::string_view text, bool surrogates);

/// A name from a file, on one line and safe to print: everything that a terminal could take for a
/// command, that has no width, or that turns the direction of text is escaped, and so are
/// backslashes and broken UTF-8. A long name is cut in its middle.
std::string printable(std::string_view name);

}  // namespace lowbit::ckpt
