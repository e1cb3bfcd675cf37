// Parts of tensor subclasses: quantized state of torchao, whose codes and scales are rows of blocks.
// A cut between two blocks moves them and changes no bit; a cut inside a block has to make new codes,
// which only a dialect can.
#pragma once

#include "container/box.h"
#include "container/document.h"
#include "container/torch_archive.h"

namespace lowbit::ckpt {

/// Whether the leaf is a subclass, whole (kSubclass) or in a directory's chunks.
bool is_subclass(const Leaf& leaf);

/// The box of such a leaf as a kSubclass of its own, without a path. `inside` tells an error that new
/// codes would mend: a cut falls inside a block (the error names the nearest rows at which none does),
/// or some chunks are plain.
Result<Leaf> cut_subclass(const Document& document, const Leaf& leaf, const Box& box, bool& inside);

/// All of such a leaf as a kSubclass. An error where it lies in chunks whose blocks do not follow one
/// another.
Result<Leaf> whole_subclass(const Document& document, const Leaf& leaf);

/// A chunk of such a leaf of a directory: a kSubclass, or a plain tensor, named by its offset too.
Result<Leaf> subclass_chunk(const Document& document, const Leaf& leaf, const Chunk& chunk);

/// Bytes of a tensor's elements as they are kept: of a subclass those of its parts. Of values 0.
Result<uint64_t> kept_bytes(const Document& document, const Leaf& leaf);
/// The same of a chunk of a directory.
Result<uint64_t> kept_bytes(const Manifest& manifest, const Tensor& tensor, const Chunk& chunk);

/// Bytes of the item that `write_archive` makes of it.
Result<uint64_t> archive_length(const TorchArchive& archive);

}  // namespace lowbit::ckpt
