// The class lowbit._checkpoint.Reader: a Reader as Python holds it.
#pragma once

#include "python/object.h"

namespace lowbit::ckpt::python {

Object make_reader_type();

}  // namespace lowbit::ckpt::python
