// The tree of dicts, lists and tuples that torch.save was given, as leaves with paths.
#pragma once

#include "container/archive.h"
#include "container/tensor_node.h"

namespace lowbit::ckpt {

/// Adds every leaf below the pickle's root. Dicts are entered; lists and tuples only where they hold
/// a tensor or (lists) a dict, as torch.distributed.checkpoint does; everything else is one value.
Status read_tree(const Pickle& pickle, Storages& storages, Archive& archive, Manifest& manifest);

}  // namespace lowbit::ckpt
