#include "container/dcp/rank_file.h"

#include <algorithm>
#include <mutex>

#include "container/dcp/items.h"
#include "io/new_directory.h"
#include "io/parallel.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 1u << 18;  // that stays in a core's cache between checksums and write

}  // namespace

Result<std::shared_ptr<RankFile>> RankFile::create(const std::string& folder,
                                                   const std::string& name, bool will_sync) {
  ASSIGN_OR_RETURN(file, NewDirectory::part_of(folder, name));
  if (!will_sync) file->leave_to_system();
  return std::shared_ptr<RankFile>(new RankFile(std::move(file)));
}

Result<std::vector<RankWritten>> RankFile::write(const std::vector<RankItem>& items, int threads,
                                                 const Progress& progress) {
  std::vector<RankWritten> out(items.size());
  uint64_t total = 0, done = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const RankItem& item = items[i];
    RankWritten& to = out[i];
    to.length = item.archive.size();
    if (item.dtype != nullptr) {
      ASSIGN_OR_RETURN(length, item_length(*item.dtype, item.shape));
      to.length = length;
    }
    to.offset = (end_ + 63) / 64 * 64;
    end_ = to.offset + to.length;
    total += to.length;
  }
  std::mutex lock;
  RETURN_IF_ERROR(parallel(items.size(), std::clamp(threads, 1, 256), [&](size_t i) -> Status {
    if (items[i].dtype == nullptr) {
      Hash hash;
      hash.add(items[i].archive.data(), items[i].archive.size());
      out[i].digest.whole = hash.hex();
      RETURN_IF_ERROR(
          file_->write(out[i].offset, items[i].archive.data(), items[i].archive.size()));
    } else {
      RETURN_IF_ERROR(write_tensor(items[i], out[i]));
    }
    const std::lock_guard held(lock);
    done += out[i].length;
    return progress(done, total) ? fine() : Status(interrupted());
  }));
  return out;
}

Status RankFile::write_tensor(const RankItem& item, RankWritten& to) {
  const auto width = static_cast<uint64_t>(item.dtype->bytes);
  const uint64_t elements = volume(item.shape), piece = kPiece / width;
  TensorItem out(file_, to.offset, 1u << 12, *item.dtype,
                 Box{Shape(item.shape.size(), 0), item.shape});
  RETURN_IF_ERROR(out.begin());
  // Pieces end at multiples of their size in the file, but for the last: the system then keeps each
  // in one run of pages, and takes a quarter less time for it.
  uint64_t n = piece - out.position() % kPiece / width;
  for (uint64_t at = 0; at < elements; at += n, n = piece) {
    n = std::min(n, elements - at);
    RETURN_IF_ERROR(out.add(item.data + at * width, n));
  }
  to.digest = out.digest();
  return fine();
}

}  // namespace lowbit::ckpt
