// The cuts of a tensor by a mesh of ranks.
#pragma once

#include <vector>

#include "container/document/writer.h"
#include "container/manifest/box.h"

namespace lowbit::ckpt {

/// The box of one rank.
struct Cut {
  int64_t rank;
  Box box;
};

/// A usage error if the mesh is contradictory.
Status check_mesh(const Mesh& mesh);

/// The boxes of a tensor, by rank. Ranks without a part of it have none, but a tensor without
/// elements keeps one box. As with DTensor's Shard, mesh dimensions cut one after the other, each
/// into parts of ceil(size / parts).
std::vector<Cut> cut(const Shape& shape, const Mesh& mesh);

}  // namespace lowbit::ckpt
