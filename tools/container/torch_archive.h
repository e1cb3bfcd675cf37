// What torch.save makes of a document: a pickle, and storages in the order that it names them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "container/document.h"
#include "container/zip.h"

namespace lowbit::ckpt {

/// The bytes of one storage: all elements of a leaf, or a whole storage of the source, which leaves
/// share or look at in parts.
struct TorchStorage {
  const Leaf* leaf = nullptr;
  bool whole = false;  // the source's record
  uint64_t bytes = 0;
};

struct TorchArchive {
  std::string pickle;
  std::vector<TorchStorage> storages;
  uint64_t tensors = 0, values = 0;

  uint64_t bytes() const {
    uint64_t n = 0;
    for (const TorchStorage& s : storages) n += s.bytes;
    return n;
  }
};

/// A document of one leaf without a path is that leaf alone.
Result<TorchArchive> torch_archive(const Document& document);

/// All records of the archive; `zip.close()` is left to do. `wrote` is called with the bytes of
/// tensors that were written in all.
Status write_archive(ZipWriter& zip, const TorchArchive& archive, const Document& document,
                     uint64_t piece, const std::function<Status(uint64_t)>& wrote);

}  // namespace lowbit::ckpt
