// Cuts of tensor subclasses, torchao's quantized states, whose codes and scales are rows of blocks.
// A cut between two blocks moves bytes and changes none. A cut inside a block needs new codes,
// which only a dialect can make.
#pragma once

#include "container/document/document.h"
#include "container/manifest/box.h"

namespace lowbit::ckpt {

/// Whether the leaf is a subclass, whole (kSubclass) or in a directory's chunks.
bool is_subclass(const Leaf& leaf);

/// The box of such a leaf as a kSubclass without a path. `inside` is set with an error that new
/// codes would avoid: a cut falls inside a block (the error names the nearest rows at which none
/// does), or some chunks are plain.
Result<Leaf> cut_subclass(const Document& document, const Leaf& leaf, const Box& box, bool& inside);

/// All of such a leaf as a kSubclass. An error if the blocks of its chunks do not follow one
/// another.
Result<Leaf> whole_subclass(const Document& document, const Leaf& leaf);

/// A chunk of such a leaf in a directory: a kSubclass or a plain tensor. Its name includes the
/// offset.
Result<Leaf> subclass_chunk(const Document& document, const Leaf& leaf, const Chunk& chunk);

/// The stored bytes of a tensor's elements: for a subclass those of its parts, for a value 0.
Result<uint64_t> kept_bytes(const Document& document, const Leaf& leaf);
/// The same of a chunk of a directory.
Result<uint64_t> kept_bytes(const Manifest& manifest, const Tensor& tensor, const Chunk& chunk);

}  // namespace lowbit::ckpt
