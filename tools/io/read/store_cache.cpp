#include "io/read/store_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace lowbit::ckpt {
namespace {

constexpr size_t kStreams = 16;  // places of one object that are read on from at a time

uint64_t down(uint64_t at) { return at / StoreCache::kBlock * StoreCache::kBlock; }
uint64_t up(uint64_t at) { return down(at + StoreCache::kBlock - 1); }

}  // namespace

const StoreCache::Window* StoreCache::find(Object& object, uint64_t at) {
  auto next = object.windows.upper_bound(at);
  if (next == object.windows.begin()) return nullptr;
  const Windows::iterator window = std::prev(next)->second;
  if (window->end() <= at) return nullptr;
  windows_.splice(windows_.begin(), windows_, window);
  return &*window;
}

uint64_t StoreCache::ahead_of(Object& object, uint64_t offset, uint64_t end) {
  auto& streams = object.streams;
  // A row's padding or an item's header between two reads is not a jump.
  const auto mine = std::ranges::find_if(
      streams, [&](const Stream& s) { return s.end <= offset && offset - s.end <= kBlock; });
  if (mine == streams.end()) {
    if (streams.size() == kStreams) streams.pop_back();
    streams.push_front({end, 0});
    return 0;
  }
  *mine = {end, std::min(std::max(2 * mine->ahead, end - offset), kAhead)};
  streams.splice(streams.begin(), streams, mine);
  return streams.front().ahead;
}

void StoreCache::drop(Windows::iterator window) {
  kept_ -= window->bytes->size();
  objects_[window->name].windows.erase(window->begin);
  windows_.erase(window);
}

void StoreCache::keep(const std::string& name, uint64_t begin, std::string bytes) {
  if (bytes.empty()) return;
  const std::lock_guard held(lock_);
  Object& object = objects_[name];
  // Another thread may have fetched some of it meanwhile: the new one has it all.
  const uint64_t end = begin + bytes.size();
  for (auto at = object.windows.lower_bound(begin);
       at != object.windows.end() && at->first < end;) {
    const auto window = (at++)->second;
    if (window->end() > end) {
      bytes.resize(window->begin - begin);
      break;
    }
    drop(window);
  }
  if (const Window* before = find(object, begin)) {
    const uint64_t known = std::min<uint64_t>(before->end() - begin, bytes.size());
    bytes.erase(0, known);
    begin += known;
  }
  if (bytes.empty()) return;
  kept_ += bytes.size();
  windows_.push_front({name, begin, std::make_shared<const std::string>(std::move(bytes))});
  object.windows[begin] = windows_.begin();
  while (kept_ > kKept && windows_.size() > 1) drop(std::prev(windows_.end()));
}

Status StoreCache::read(const std::string& name, uint64_t size, uint64_t offset, char* out,
                        uint64_t bytes) {
  const uint64_t end = offset + bytes;
  bool first = true;
  uint64_t ahead = 0;
  for (uint64_t at = offset; at < end;) {
    uint64_t begin = down(at), stop = size;
    {
      const std::lock_guard held(lock_);
      Object& object = objects_[name];
      if (std::exchange(first, false)) ahead = ahead_of(object, offset, end);
      if (const Window* window = find(object, at)) {
        const uint64_t n = std::min(end, window->end()) - at;
        std::memcpy(out + (at - offset), window->bytes->data() + (at - window->begin), n);
        at += n;
        // What was read to its end is not read again, as a rule.
        if (at == window->end() && window->bytes->size() > kBlock)
          drop(object.windows[window->begin]);
        continue;
      }
      const auto next = object.windows.upper_bound(at);
      if (next != object.windows.begin()) begin = std::max(begin, std::prev(next)->second->end());
      if (next != object.windows.end()) stop = std::min(stop, next->first);
    }
    stop = std::min(stop, std::max(up(end), std::min(up(at + ahead), up(end) + kAhead)));
    stop = std::min(stop, begin + kRequest);
    ASSIGN_OR_RETURN(got, from_->read(name, begin, stop));
    if (got.size() != stop - begin)
      return bad("gave " + std::to_string(got.size()) + " bytes where " +
                 std::to_string(stop - begin) + " were asked for");
    const uint64_t n = std::min(end, stop) - at;
    std::memcpy(out + (at - offset), got.data() + (at - begin), n);
    at += n;
    // Of a long read the edges are kept: other reads have the rest of their blocks.
    if (n >= kAhead / 4) {
      if (at - n > begin) keep(name, begin, got.substr(0, std::min<uint64_t>(kBlock, got.size())));
      got.erase(0, down(at) > begin ? down(at) - begin : 0);
      begin = std::max(begin, down(at));
      if (at == stop) continue;
    }
    keep(name, begin, std::move(got));
  }
  return fine();
}

}  // namespace lowbit::ckpt
