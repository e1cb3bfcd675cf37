// Float32 to codes with one scale for each block, by the kernels of the optimizer's step
// (csrc/cpu).
#pragma once

#include <memory>
#include <string>

#include "dialect/model/model.h"
#include "dialect/numbers/report.h"

namespace lowbit::ckpt {

/// Quantizes a tensor row by row (see matrix_of). Nothing is computed until the sources of the
/// result are read, and nothing of the tensor's size is held: where scales are few they are kept
/// until they are read, else the values are read again. `report` receives the errors while codes
/// are read; it may be null, and must outlive the result.
Codes quantized(std::shared_ptr<Floats> values, const Shape& shape, const std::string& format,
                int64_t block, StateReport* report);

}  // namespace lowbit::ckpt
