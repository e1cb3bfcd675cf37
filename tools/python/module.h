// What the module lowbit._checkpoint is made of besides its functions.
#pragma once

#include "python/object.h"

namespace lowbit::ckpt::python {

/// The class Reader: a python::Reader as Python holds it.
Object make_reader_type();
/// The class RankFile: the file that one rank adds to a directory.
Object make_rank_file_type();
/// URLs are opened by lowbit.checkpoint.object_store from now on.
void use_python_stores();

}  // namespace lowbit::ckpt::python
