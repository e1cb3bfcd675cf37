#include "container/dcp/rank_file.h"

#include <algorithm>
#include <mutex>

#include "container/dcp/items.h"
#include "io/parallel.h"
#include "io/write/new_directory.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 1u << 18;  // that stays in a core's cache between its checksums

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
  // One thread writes all items in one run, several a run for each item.
  const bool single = threads <= 1 || items.size() <= 1;
  const auto all = std::make_shared<WriteRun>(file_);
  std::mutex lock;
  RETURN_IF_ERROR(parallel(items.size(), std::clamp(threads, 1, 256), [&](size_t i) -> Status {
    const auto run = single ? all : std::make_shared<WriteRun>(file_);
    RETURN_IF_ERROR(write_item(items[i], out[i], run));
    if (!single) RETURN_IF_ERROR(run->flush());
    const std::lock_guard held(lock);
    done += out[i].length;
    return progress(done, total) ? fine() : Status(interrupted());
  }));
  RETURN_IF_ERROR(all->flush());
  return out;
}

Status RankFile::write_item(const RankItem& item, RankWritten& to,
                            const std::shared_ptr<WriteRun>& file) {
  if (item.dtype == nullptr) {
    Hash hash;
    hash.add(item.archive.data(), item.archive.size());
    to.digest.whole = hash.hex();
    return file->write(to.offset, item.archive.data(), item.archive.size());
  }
  const uint64_t elements = volume(item.shape), width = static_cast<uint64_t>(item.dtype->bytes),
                 piece = kPiece / width;
  TensorItem out(file, to.offset, WriteRun::kCopied, *item.dtype,
                 Box{Shape(item.shape.size(), 0), item.shape});
  RETURN_IF_ERROR(out.begin());
  for (uint64_t at = 0; at < elements; at += piece)
    RETURN_IF_ERROR(out.add(item.data + at * width, std::min(piece, elements - at)));
  to.digest = out.digest();
  return fine();
}

}  // namespace lowbit::ckpt
