// Bytes of objects that were fetched with others: a request takes as long for 16 KiB as for some
// bytes, and what is read one piece after the other comes in few large requests.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "io/read/store.h"

namespace lowbit::ckpt {

/// Requests are for whole blocks of an object. A read that continues where an earlier one ended
/// fetches twice as much ahead as that did, up to kAhead; what is ahead is kept until it was read,
/// at most kKept bytes of one folder. All functions are thread-safe.
class StoreCache {
 public:
  static constexpr uint64_t kBlock = 16u << 10, kAhead = 4u << 20, kRequest = 16u << 20,
                            kKept = 32u << 20;
  explicit StoreCache(std::shared_ptr<StoreLocation> from) : from_(std::move(from)) {}
  StoreLocation& location() { return *from_; }
  /// Bytes at `offset` of an object of `size` bytes.
  Status read(const std::string& name, uint64_t size, uint64_t offset, char* out, uint64_t bytes);

 private:
  struct Window {
    std::string name;
    uint64_t begin;
    std::shared_ptr<const std::string> bytes;
    uint64_t end() const { return begin + bytes->size(); }
  };
  using Windows = std::list<Window>;  // the one used last comes first
  /// Where the last reads of an object ended, and how much was fetched ahead there.
  struct Stream {
    uint64_t end = 0, ahead = 0;
  };
  struct Object {
    std::map<uint64_t, Windows::iterator> windows;  // by their begin; they do not overlap
    std::list<Stream> streams;                      // the one used last comes first
  };

  /// Under the lock: the window that has the byte; null where none does.
  const Window* find(Object& object, uint64_t at);
  /// Under the lock: how much a read of [offset, end) fetches ahead.
  uint64_t ahead_of(Object& object, uint64_t offset, uint64_t end);
  void keep(const std::string& name, uint64_t begin, std::string bytes);
  void drop(Windows::iterator window);

  std::shared_ptr<StoreLocation> from_;
  std::mutex lock_;
  std::map<std::string, Object> objects_;
  Windows windows_;
  uint64_t kept_ = 0;
};

}  // namespace lowbit::ckpt
