// Small reads of one range of a file, served by few larger ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "io/read/file.h"

namespace lowbit::ckpt {

/// A file whose bytes [begin, end) are read in blocks. An archive of torch.save has some thirty
/// headers of a few bytes, most of them at its beginning and at its end: two blocks hold both. For
/// one thread, and as long as `file` lives.
class BufferedFile : public File {
 public:
  BufferedFile(const File& file, uint64_t begin, uint64_t end)
      : File(file.identity(), file.name()), file_(file), begin_(begin), end_(end) {}

 private:
  static constexpr uint64_t kBlock = 2048;
  struct Block {
    uint64_t begin = 0, end = 0;
    std::array<char, kBlock> bytes;
  };

  Status fetch(uint64_t offset, char* out, uint64_t bytes) const override {
    const bool inside =
        offset >= begin_ && end_ <= size() && offset <= end_ && bytes <= end_ - offset;
    if (!inside || bytes > kBlock / 2) return file_.read(offset, out, bytes);
    const auto holds = [&](const Block& b) { return b.begin <= offset && offset + bytes <= b.end; };
    auto found = std::ranges::find_if(blocks_, holds);
    if (found == blocks_.end()) {
      found = blocks_.begin() + oldest_;
      oldest_ = 1 - oldest_;
      // A read near the end takes what lies before it too: a zip is read from its end.
      const uint64_t last = end_ - std::min(kBlock, end_ - begin_), first = std::min(offset, last);
      found->end = found->begin = first;
      RETURN_IF_ERROR(file_.read(first, found->bytes.data(), std::min(kBlock, end_ - first)));
      found->end = first + std::min(kBlock, end_ - first);
    }
    std::memcpy(out, found->bytes.data() + (offset - found->begin), bytes);
    return fine();
  }

  const File& file_;
  const uint64_t begin_, end_;
  mutable std::array<Block, 2> blocks_;
  mutable std::ptrdiff_t oldest_ = 0;
};

}  // namespace lowbit::ckpt
