// The class lowbit._checkpoint.RankFile: the file that one rank adds to a directory.
#pragma once

#include "python/object.h"

namespace lowbit::ckpt::python {

Object make_rank_file_type();

}  // namespace lowbit::ckpt::python
