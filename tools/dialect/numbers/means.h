// The means of a factored second moment.
#pragma once

#include <memory>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// Means over the last dimension (`of_rows`) or over the last but one, for values of two or more
/// dimensions.
std::shared_ptr<Floats> means_of(std::shared_ptr<Floats> values, const Shape& shape, bool of_rows);

}  // namespace lowbit::ckpt
