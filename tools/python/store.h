// Object stores, read through fsspec.
#pragma once

namespace lowbit::ckpt::python {

/// URLs are opened by lowbit.checkpoint.object_store from now on.
void use_python_stores();

}  // namespace lowbit::ckpt::python
