// Tensors that are named and stay unread: those without plain elements, and of classes that are not
// known.
#pragma once

#include <string>

#include "pickle/value.h"

namespace lowbit::ckpt {

/// What kind of tensor lies at a node ("a sparse tensor"), if it is one that is not read; "" for
/// any other node, and for a tensor that is wrong in some other way, which read_tensor tells.
std::string unread_kind(const Pickle& pickle, NodeId node);

/// What unread_kind says of torch's ShardedTensor begins so: it is not a whole tensor.
constexpr const char* kOneRank = "one rank's shards";

}  // namespace lowbit::ckpt
