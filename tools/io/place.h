// Where what is written lies: its folder, and the temporary name that it has until it is whole.
#pragma once

#include <string>

#include "io/status.h"

namespace lowbit::ckpt {

/// The folder that holds `path`, with its last '/'; empty for the current one.
std::string parent_of(const std::string& path);
/// Waits until the disk knows what the folder holds; an empty path is the current one.
Status sync_folder(const std::string& path);

/// The temporary name of what shall be NAME in its folder is .NAME.partial-XXXXXX.
std::string partial_name(const std::string& name);
/// Whether a path's last name is such a one: what lies there was being written when its program was
/// killed.
bool is_partial(const std::string& path);
/// A path with the name that it gets when it is whole, where its name is a temporary one, or that of
/// a folder in it.
std::string final_path(const std::string& path);

/// Why `path` cannot be written, as errno has it, in the words of who knows its final name.
Error unwritten(const std::string& path);

}  // namespace lowbit::ckpt
