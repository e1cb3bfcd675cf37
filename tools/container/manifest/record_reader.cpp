#include "container/manifest/record_reader.h"

#include <algorithm>

#include "io/crc32.h"
#include "io/text.h"

namespace lowbit::ckpt {

std::shared_ptr<RecordReader::Progress> RecordReader::progress(const Record& record,
                                                               const std::string& what) {
  const std::lock_guard held(lock_);
  const auto [found, is_new] = begun_.try_emplace({record.file, record.offset});
  if (is_new && record.size != 0) {
    if (record.has_crc) {
      found->second = std::make_shared<Progress>();
      found->second->record = record;
      found->second->what = what;
    } else {
      ++unchecked_;
    }
  }
  return found->second;
}

Status RecordReader::read(const Record& record, uint64_t at, void* out, uint64_t bytes,
                          const std::string& what) {
  ASSIGN_OR_RETURN(file, files_.open(record.file));
  RETURN_IF_ERROR(file->read(record.offset + at, out, bytes));
  return hold(record, at, out, bytes, what);
}

Status RecordReader::read_all(const Record& record, uint64_t limit, const std::string& what,
                              const std::function<Status(const char*, uint64_t)>& use) {
  std::string buffer;
  for (uint64_t at = 0; at < record.size; at += buffer.size()) {
    buffer.resize(std::min(limit, record.size - at));
    RETURN_IF_ERROR(read(record, at, buffer.data(), buffer.size(), what));
    RETURN_IF_ERROR(use(buffer.data(), buffer.size()));
  }
  return fine();
}

Status RecordReader::hold(const Record& record, uint64_t at, const void* data, uint64_t bytes,
                          const std::string& what) {
  const auto p = progress(record, what);
  if (p == nullptr) return fine();
  const std::lock_guard held(p->lock);
  return p->done ? fine() : add(*p, at, static_cast<const char*>(data), bytes);
}

Status RecordReader::add(Progress& p, uint64_t at, const char* data, uint64_t bytes) {
  constexpr size_t kMaxParts = 1024;
  const uint64_t end = at + bytes;
  auto& parts = p.parts;
  while (at < end) {
    // The first part that ends behind `at`: what lies before it is new.
    const auto next =
        std::ranges::partition_point(parts, [at](const Part& q) { return q.end <= at; });
    if (next != parts.end() && next->begin <= at) {
      const uint64_t known = std::min(end, next->end) - at;
      at += known;
      data += known;
      continue;
    }
    const uint64_t stop = next == parts.end() ? end : std::min(end, next->begin);
    const bool after = next != parts.begin() && (next - 1)->end == at;
    const bool before = next != parts.end() && next->begin == stop;
    auto mine = next;
    if (after) {
      mine = next - 1;
      mine->crc = crc32(mine->crc, data, stop - at);
      mine->end = stop;
    } else {
      mine = parts.insert(next, {at, stop, crc32(0, data, stop - at)});
    }
    if (before) {
      const auto other = mine + 1;
      mine->crc = crc32_joined(mine->crc, other->crc, other->end - other->begin);
      mine->end = other->end;
      parts.erase(other);
    }
    data += stop - at;
    at = stop;
  }
  // Scattered reading: rather the whole record once than a long list.
  if (parts.size() > kMaxParts) return add_rest(p);
  return parts.size() == 1 && parts[0].end - parts[0].begin == p.record.size ? compare(p) : fine();
}

Status RecordReader::add_rest(Progress& p) {
  ASSIGN_OR_RETURN(file, files_.open(p.record.file));
  std::string buffer;
  uint32_t crc = 0;
  uint64_t at = 0;
  const std::vector<Part> parts = std::move(p.parts);
  const auto read_to = [&](uint64_t end) -> Status {
    while (at < end) {
      buffer.resize(std::min<uint64_t>(1u << 20, end - at));
      RETURN_IF_ERROR(file->read(p.record.offset + at, buffer.data(), buffer.size()));
      crc = crc32(crc, buffer.data(), buffer.size());
      at += buffer.size();
    }
    return fine();
  };
  for (const Part& part : parts) {
    RETURN_IF_ERROR(read_to(part.begin));
    crc = crc32_joined(crc, part.crc, part.end - part.begin);
    at = part.end;
  }
  RETURN_IF_ERROR(read_to(p.record.size));
  p.parts = {{0, p.record.size, crc}};
  return compare(p);
}

Status RecordReader::compare(Progress& p) {
  p.done = true;
  if (p.parts[0].crc != p.record.crc) {
    const std::string file = files_.name(p.record.file), name = printable(p.record.name);
    return damaged(files_.shown(p.record.file) + ": " + p.what + ": the checksum of its record " +
                   name + " is wrong: the file is damaged")
        .at("", file, name);
  }
  const std::lock_guard held(lock_);
  begun_[{p.record.file, p.record.offset}] = nullptr;
  return fine();
}

Status RecordReader::finish() {
  std::vector<std::shared_ptr<Progress>> open;
  {
    const std::lock_guard held(lock_);
    for (const auto& [key, p] : begun_) {
      if (p != nullptr) open.push_back(p);
    }
  }
  for (const auto& p : open) {
    const std::lock_guard held(p->lock);
    // A record that failed its check before fails it again.
    RETURN_IF_ERROR(p->done ? compare(*p) : add_rest(*p));
  }
  return files_.check_unchanged();
}

}  // namespace lowbit::ckpt
