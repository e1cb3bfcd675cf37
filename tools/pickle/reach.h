// Which nodes of a pickle hold tensors: what leaves an object out leaves them out too.
#pragma once

#include <utility>
#include <vector>

#include "pickle/value.h"

namespace lowbit::ckpt {

/// Opaque objects with what they were given: their arguments, an item, their state. A Node has no
/// place for these.
using Given = std::vector<std::pair<NodeId, NodeId>>;

/// By node: whether a tensor or a storage lies there or anywhere below, in the attributes of
/// objects too. Objects may refer to each other in circles.
std::vector<bool> tensor_holders(const Pickle& pickle, const Given& given);

}  // namespace lowbit::ckpt
