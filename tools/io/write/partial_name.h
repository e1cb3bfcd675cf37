// Temporary names: what is being written is called .NAME.partial-XXXXXX until it is complete.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// The parent folder of `path`, with its final '/'; empty for the current folder.
std::string parent_of(const std::string& path);
/// Waits until the folder's entries are on the disk; an empty path is the current folder.
Status sync_folder(const std::string& path);

/// Temporary names that are not drawn: of a save, of what parts write, and of what is being
/// removed. Each has as many letters as a drawn one, by which `is_partial` knows them.
inline constexpr std::string_view kSaving = "saving", kPieces = "pieces", kRemoved = "remove";

/// What the temporary names for NAME begin with: .NAME.partial-. Of a NAME that is too long for
/// that it has a beginning and a digest.
std::string partial_stem(const std::string& name);
/// The template of the temporary name for NAME: .NAME.partial-XXXXXX.
std::string partial_name(const std::string& name);
/// Whether the last name of a path is temporary: the program that wrote it was killed.
bool is_partial(const std::string& path);
/// What killed runs left of earlier writings of `path`, or what another run writes there now.
std::vector<std::string> leftovers_of(const std::string& path);
/// The permissions that all of these checkpoints have; the owner's are always among them.
unsigned mode_of(const std::vector<std::string>& sources);
/// The permissions that this process takes from what it makes.
unsigned mask_of_process();
/// The path with temporary names replaced by final ones, in its last name and in its folders.
std::string final_path(const std::string& path);

/// The error for a `path` that cannot be written, by errno. It shows the final name.
Error unwritten(const std::string& path);

}  // namespace lowbit::ckpt
