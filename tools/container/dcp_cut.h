// How a mesh of ranks cuts a tensor.
#pragma once

#include <vector>

#include "container/box.h"
#include "container/writer.h"

namespace lowbit::ckpt {

/// The box of one rank.
struct Cut {
  int64_t rank;
  Box box;
};

/// An error (usage) where the mesh has no sense.
Status check_mesh(const Mesh& mesh);

/// The boxes of a tensor, by rank; ranks without a part of it are left out, but a tensor without
/// elements keeps one box. As DTensor's Shard does: mesh dimensions cut one after the other, each
/// into parts of ceil(size / parts).
std::vector<Cut> cut(const Shape& shape, const Mesh& mesh);

}  // namespace lowbit::ckpt
