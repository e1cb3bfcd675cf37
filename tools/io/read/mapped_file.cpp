#include "io/read/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kWindow = 4u << 20;  // mapped at a time: larger windows gain nothing
// Of a file that one entry maps, if the system keeps it in one run of pages.
constexpr uint64_t kAligned = 2u << 20;
constexpr uint64_t kAround = 1u << 16;  // that the system maps around a page
constexpr size_t kMaxIdle = 16;
#ifdef MADV_POPULATE_READ
constexpr int kPopulate = MADV_POPULATE_READ;
#else
constexpr int kPopulate = 22;  // of Linux 5.14; older ones refuse it
#endif

/// Whether a file lies on a disk of this machine, or in its memory. Over a network a page that was
/// there may go before it is copied, and what then fails is a signal.
bool is_local(int fd) {
  struct statfs about{};
  if (::fstatfs(fd, &about) != 0) return false;
  switch (static_cast<uint32_t>(about.f_type)) {
    case 0xEF53:      // ext2, ext3, ext4
    case 0x58465342:  // XFS
    case 0x9123683E:  // Btrfs
    case 0xF2F52010:  // F2FS
    case 0x2FC12FC1:  // ZFS
    case 0x01021994:  // tmpfs
    case 0x794C7630:  // overlayfs
      return true;
    default:
      return false;
  }
}

#ifdef SYS_cachestat
constexpr long kCachestat = SYS_cachestat;
#else
constexpr long kCachestat = 451;  // of Linux 6.5, on x86-64 and ARM64
#endif

/// Whether all pages of [begin, end) are in the cache. False on an older Linux.
bool is_cached(int fd, uint64_t begin, uint64_t end, uint64_t page) {
  struct {
    uint64_t begin, bytes;
  } range = {begin, end - begin};
  struct {
    uint64_t cached, dirty, written_back, evicted, recently_evicted;
  } about = {};
  return ::syscall(kCachestat, fd, &range, &about, 0) == 0 &&
         about.cached >= (end - begin + page - 1) / page;
}

/// Maps a window whose pages are all in the cache: a page of every kAround is asked for, and the
/// system maps those around it that have been read. False where one is left, such as one that a
/// failed read left in the cache.
bool map_around(char* begin, uint64_t bytes, uint64_t page) {
  for (uint64_t at = 0; at < bytes; at += kAround) {
    if (::madvise(begin + at, std::min(page, bytes - at), kPopulate) != 0) return false;
  }
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  return ::mincore(begin, bytes, pages.data()) == 0 &&
         std::ranges::all_of(pages, [](unsigned char p) { return (p & 1) != 0; });
}

/// Whether mincore tells of this file; of others it says that all pages are there.
bool is_own(int fd) {
  struct stat info{};
  const uid_t user = ::geteuid();
  return ::fstat(fd, &info) == 0 && (user == 0 || user == info.st_uid);
}

}  // namespace

MappedFile::~MappedFile() { drop(); }

void MappedFile::drop() {
  if (window_ != nullptr) ::munmap(window_, end_ - begin_);
  window_ = nullptr;
  begin_ = end_ = 0;
}

void MappedFile::drop_if_shorter() {
  struct stat info{};
  if (window_ != nullptr &&
      (::fstat(file_->descriptor(), &info) != 0 || static_cast<uint64_t>(info.st_size) < end_))
    drop();
}

const char* MappedFile::at(uint64_t offset, uint64_t bytes, uint64_t end) {
  if (covers(offset, bytes)) return window_ + (offset - begin_);
  drop();
  const int fd = file_->descriptor();
  if (!mappable_) mappable_ = fd >= 0 && is_local(fd);
  if (!*mappable_ || offset + bytes > file_->size()) return nullptr;
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  begin_ = offset / page * page;
  end_ = std::min(std::max(end, offset + bytes), begin_ + std::max(kWindow, bytes + page));
  // What lies around is mapped too where that reads nothing.
  const uint64_t low = begin_ / kAligned * kAligned,
                 high = std::min(file_->size(), (end_ + kAligned - 1) / kAligned * kAligned);
  const bool cached = is_own(fd) && is_cached(fd, low, high, page);
  if (cached) {
    begin_ = low;
    end_ = high;
  }
  end_ = std::min(end_, file_->size());
  void* made =
      ::mmap(nullptr, end_ - begin_, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin_));
  if (made == MAP_FAILED) return nullptr;
  window_ = static_cast<char*>(made);
  // A page of every 16 takes less than half the time.
  if (cached && map_around(window_, end_ - begin_, page)) return window_ + (offset - begin_);
  if (::madvise(window_, end_ - begin_, kPopulate) != 0) {
    if (errno == EINVAL) mappable_ = false;  // an older Linux: it need not be asked again
    drop();
    return nullptr;
  }
  return window_ + (offset - begin_);
}

std::unique_ptr<MappedFile> MappedFiles::take(std::shared_ptr<const File> file) {
  const std::lock_guard held(lock_);
  const auto known = std::find_if(idle_.rbegin(), idle_.rend(),
                                  [&](const auto& one) { return one->file() == file; });
  if (known == idle_.rend()) return std::make_unique<MappedFile>(std::move(file));
  std::unique_ptr<MappedFile> found = std::move(*known);
  idle_.erase(std::next(known).base());
  found->drop_if_shorter();
  return found;
}

void MappedFiles::give_back(std::unique_ptr<MappedFile> one) {
  const std::lock_guard held(lock_);
  if (idle_.size() == kMaxIdle) idle_.erase(idle_.begin());
  idle_.push_back(std::move(one));
}

}  // namespace lowbit::ckpt
