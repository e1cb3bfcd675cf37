// The files that ranks write for ZeRO's optimizer, one each.
#pragma once

#include <string>
#include <vector>

#include "container/deepspeed/parts.h"

namespace lowbit::ckpt {

/// All ranks' files, in order. What else lies there tells what the folder needs to be read.
Result<std::vector<std::string>> find_rank_files(const Parts& parts);

/// That a rank's file is one of so many `files`. `base`: where it has its optimizer's state.
Status check_rank_count(const PartFile& file, const Parts& parts, size_t files, const Path& base);

}  // namespace lowbit::ckpt
