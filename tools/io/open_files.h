// How many files of one kind may be open.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>

namespace lowbit::ckpt {

/// The `part`-th part of what the process may have open, at least `least` and at most `most`.
inline size_t part_of_open_files(size_t part, size_t least, size_t most) {
  struct rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = 64;
  return static_cast<size_t>(std::clamp<rlim_t>(limit.rlim_cur / part, least, most));
}

}  // namespace lowbit::ckpt
