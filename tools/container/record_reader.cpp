#include "container/record_reader.h"

#include <libdeflate.h>

#include <algorithm>

#include "io/text.h"

namespace lowbit::ckpt {

Status RecordReader::read(const Record& record, uint64_t at, void* out, uint64_t bytes,
                          const std::string& what) {
  const auto [found, is_new] = begun_.try_emplace({record.file, record.offset});
  Progress& p = found->second;
  if (is_new) {
    p.record = record;
    p.what = what;
    p.done = !record.has_crc || record.size == 0;
    unchecked_ += !record.has_crc && record.size != 0;
  }
  if (!p.done && at != p.next) LB_CHECK(check_rest(p));
  LB_TRY(file, files_.open(record.file));
  LB_CHECK(file->read(record.offset + at, out, bytes));
  if (p.done) return fine();
  p.crc = libdeflate_crc32(p.crc, out, bytes);
  p.next += bytes;
  return p.next == record.size ? compare(p) : fine();
}

Status RecordReader::check_rest(Progress& p) {
  LB_TRY(file, files_.open(p.record.file));
  std::string buffer;
  while (p.next < p.record.size) {
    buffer.resize(std::min<uint64_t>(1u << 20, p.record.size - p.next));
    LB_CHECK(file->read(p.record.offset + p.next, buffer.data(), buffer.size()));
    p.crc = libdeflate_crc32(p.crc, buffer.data(), buffer.size());
    p.next += buffer.size();
  }
  return compare(p);
}

Status RecordReader::compare(Progress& p) {
  p.done = true;
  return p.crc == p.record.crc
             ? fine()
             : Status(bad(p.what + ": the checksum of its record " + printable(p.record.name) +
                          " is wrong: the file is damaged"));
}

Status RecordReader::finish() {
  for (auto& [key, p] : begun_) {
    if (p.done) continue;
    if (const Status rest = check_rest(p); !rest.ok())
      return rest.error().at("", files_.name(p.record.file), printable(p.record.name));
  }
  return files_.check_unchanged();
}

}  // namespace lowbit::ckpt
