#include <algorithm>

#include "container/zip/zip.h"
#include "container/zip/zip_layout.h"
#include "io/crc32.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {

// Headers as PyTorchStreamWriter writes them: UTF-8 names, sizes in a descriptor behind the data
// (none where it is empty), and padding in an extra field 'FB' so that data starts at a multiple of
// 64 from the archive's start.
Status ZipWriter::begin(const std::string& name, uint64_t size) {
  const std::string full = folder_ + "/" + name;
  const uint64_t at = out_.position() - base_;
  std::string extra;
  if (size >= kMax32 || at >= kMax32) {
    if (size >= kMax32) extra += little(size, 8) + little(size, 8);
    if (at >= kMax32) extra += little(at, 8);
    extra = little(1, 2) + little(extra.size(), 2) + extra;
  }
  const uint64_t start = at + 30 + full.size() + 4 + extra.size();
  const uint64_t padding = (kAlignment - start % kAlignment) % kAlignment;
  extra += "FB" + little(padding, 2) + std::string(padding, 'Z');
  const auto flags = static_cast<uint16_t>(0x0800 | (size > 0 ? 8 : 0));
  records_.push_back({full, flags, 0, size, at});
  return out_.write(little(kLocal, 4) + little(0, 2) + little(flags, 2) + std::string(18, '\0') +
                    little(full.size(), 2) + little(extra.size(), 2) + full + extra);
}

Status ZipWriter::data(const void* bytes, uint64_t count) {
  records_.back().crc = crc32(records_.back().crc, bytes, count);
  return out_.write(bytes, count);
}

Status ZipWriter::skip(uint64_t count) { return out_.write(nullptr, count); }

Status ZipWriter::end() {
  const WrittenRecord& e = records_.back();
  if (e.size == 0) return fine();
  const int width = e.size >= kMax32 || e.offset >= kMax32 ? 8 : 4;
  return out_.write(little(kDescriptor, 4) + little(e.crc, 4) + little(e.size, width) +
                    little(e.size, width));
}

Status ZipWriter::record(const std::string& name, const std::string& bytes) {
  RETURN_IF_ERROR(begin(name, bytes.size()));
  RETURN_IF_ERROR(data(bytes.data(), bytes.size()));
  return end();
}

Status ZipWriter::close(const std::string& serialization_id) {
  RETURN_IF_ERROR(record("version", "3\n"));
  RETURN_IF_ERROR(record(".data/serialization_id", serialization_id));
  const uint64_t start = out_.position() - base_;
  std::string bytes;
  for (const WrittenRecord& e : records_) {
    std::string extra;
    if (e.size >= kMax32) extra += little(e.size, 8) + little(e.size, 8);
    if (e.offset >= kMax32) extra += little(e.offset, 8);
    if (!extra.empty()) extra = little(1, 2) + little(extra.size(), 2) + extra;
    bytes += little(kCentral, 4) + little(0, 4) + little(e.flags, 2) + little(0, 6) +
             little(e.crc, 4) + little(std::min(e.size, kMax32), 4) +
             little(std::min(e.size, kMax32), 4) + little(e.name.size(), 2) +
             little(extra.size(), 2) + std::string(10, '\0') +
             little(std::min(e.offset, kMax32), 4) + e.name + extra;
  }
  const uint64_t size = bytes.size(), end = start + size, n = records_.size();
  bytes += little(kEnd64, 4) + little(44, 8) + little(0x031e, 2) + little(45, 2) + little(0, 8) +
           little(n, 8) + little(n, 8) + little(size, 8) + little(start, 8);
  bytes += little(kLocator64, 4) + little(0, 4) + little(end, 8) + little(1, 4);
  bytes += little(kEnd, 4) + little(0, 4) + little(std::min<uint64_t>(n, 0xffff), 2) +
           little(std::min<uint64_t>(n, 0xffff), 2) + little(std::min(size, kMax32), 4) +
           little(std::min(start, kMax32), 4) + little(0, 2);
  return out_.write(bytes);
}

}  // namespace lowbit::ckpt
