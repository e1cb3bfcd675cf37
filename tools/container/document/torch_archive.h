// A torch.save archive to be written: its pickle, and its storages in the pickle's order.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "container/document/document.h"
#include "container/zip/zip.h"

namespace lowbit::ckpt {

/// The bytes of one storage: all elements of a leaf, or a whole storage of the source that several
/// leaves share or view in part.
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

/// The archive of a document. A document of one leaf without a path is that leaf alone.
Result<TorchArchive> torch_archive(const Document& document);

/// The folder inside the zip of a file: its name without the last suffix, as torch calls it.
std::string archive_folder(const std::string& path);
/// The size of the item that `write_archive` writes.
Result<uint64_t> archive_length(const TorchArchive& archive);
/// Writes all records of the archive; the caller closes `zip`. `wrote` is called with the bytes of
/// tensors written so far.
Status write_archive(ZipWriter& zip, const TorchArchive& archive, const Document& document,
                     uint64_t piece, const std::function<Status(uint64_t)>& wrote);

}  // namespace lowbit::ckpt
