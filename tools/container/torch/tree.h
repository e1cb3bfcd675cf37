// The object that torch.save was given, as leaves with paths.
#pragma once

#include "container/common/archive.h"
#include "container/pickled/tensor_node.h"

namespace lowbit::ckpt {

constexpr uint64_t kMaxPickle = 512u << 20;  // bytes of what torch.save writes beside the storages

/// Adds every leaf below the root of the pickle. As in torch.distributed.checkpoint, dicts are
/// traversed, lists and tuples only if they contain a tensor or (lists) a dict; anything else is
/// one value.
Status read_tree(const Pickle& pickle, Storages& storages, Archive& archive, Manifest& manifest);

}  // namespace lowbit::ckpt
