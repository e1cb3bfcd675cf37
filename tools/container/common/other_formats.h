// What files and folders of other programs look like, which are not read here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// An error that says whose checkpoint a folder with these entries is, and what to do; fine where
/// nothing is known of it.
Status check_other_folder(const std::string& folder, const std::vector<std::string>& names);

/// The same of a folder by the names of files in it; the first of them is named.
Status check_other_files(const std::string& folder, const std::vector<std::string>& names);

/// Whether a zip has the name of another program's, whose records are not torch's.
bool is_other_zip(const std::string& path);

/// The same of a file that begins with `head`.
Status check_other_file(const std::string& path, std::string_view head);

}  // namespace lowbit::ckpt
