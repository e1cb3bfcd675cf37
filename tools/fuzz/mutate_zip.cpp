// Zips by their directories.
#include <algorithm>
#include <optional>

#include "container/zip/zip_layout.h"
#include "fuzz/mutate.h"
#include "io/crc32.h"

namespace lowbit::ckpt {
namespace {

constexpr size_t kEndSize = 22, kCentralSize = 46, kLocalSize = 30;

uint64_t number_at(const std::string& s, size_t at, size_t width) {
  uint64_t n = 0;
  for (size_t i = 0; i < width && at + i < s.size(); ++i)
    n |= uint64_t{static_cast<uint8_t>(s[at + i])} << (8 * i);
  return n;
}

void set_number(std::string& s, size_t at, size_t width, uint64_t n) {
  for (size_t i = 0; i < width && at + i < s.size(); ++i)
    s[at + i] = static_cast<char>(n >> (8 * i));
}

std::string little_of(uint64_t n, size_t width) {
  std::string out(width, '\0');
  set_number(out, 0, width, n);
  return out;
}

/// A record, by places in the whole input.
struct Record {
  size_t central, local, data, size;
  std::string name;
  bool has_descriptor;
};

struct Zip {
  size_t end;  // of the end record
  std::vector<Record> records;
};

/// The zip whose end record lies at `end`; none where its directory makes no sense.
std::optional<Zip> zip_at(const std::string& s, size_t end) {
  if (s.size() - end < kEndSize) return std::nullopt;
  const uint64_t count = number_at(s, end + 10, 2), size = number_at(s, end + 12, 4),
                 offset = number_at(s, end + 16, 4);
  size_t stop = end;  // of the directory
  constexpr size_t kWide = 56 + 20;
  if (end >= kWide && number_at(s, end - kWide, 4) == kEnd64) stop = end - kWide;
  if (size + offset > stop) return std::nullopt;
  const size_t base = stop - size - offset;
  Zip out{end, {}};
  size_t at = base + offset;
  for (uint64_t i = 0; i < count; ++i) {
    if (at + kCentralSize > stop || number_at(s, at, 4) != kCentral) return std::nullopt;
    Record r{at, base + number_at(s, at + 42, 4), 0, number_at(s, at + 24, 4), {}, false};
    r.name = s.substr(at + kCentralSize, number_at(s, at + 28, 2));
    r.data = r.local + kLocalSize + number_at(s, r.local + 26, 2) + number_at(s, r.local + 28, 2);
    r.has_descriptor = (number_at(s, at + 8, 2) & 8) != 0;
    if (r.data > stop || r.size > stop - r.data) return std::nullopt;
    at += kCentralSize + r.name.size() + number_at(s, at + 30, 2) + number_at(s, at + 32, 2);
    out.records.push_back(std::move(r));
  }
  return out;
}

uint32_t crc_of(const std::string& s, const Record& r) {
  return crc32(0, s.data() + r.data, r.size);
}

/// Writes the checksum where the writer had one.
void seal(std::string& s, const Record& r) {
  if (number_at(s, r.central + 16, 4) == 0) return;
  const uint32_t crc = crc_of(s, r);
  set_number(s, r.central + 16, 4, crc);
  if (number_at(s, r.local + 14, 4) != 0) set_number(s, r.local + 14, 4, crc);
  if (r.has_descriptor) set_number(s, r.data + r.size + 4, 4, crc);
}

/// A field of a record's two headers, or of the end record.
void mutate_field(std::string& s, const Zip& zip, const Record& r, Dice& dice) {
  struct Field {
    size_t at, width;
  };
  std::vector<Field> fields = {
      {zip.end + 8, 2},    {zip.end + 10, 2},   {zip.end + 12, 4},   {zip.end + 16, 4},
      {zip.end + 20, 2},   {r.central + 8, 2},  {r.central + 10, 2}, {r.central + 16, 4},
      {r.central + 20, 4}, {r.central + 24, 4}, {r.central + 28, 2}, {r.central + 30, 2},
      {r.central + 42, 4}, {r.local + 6, 2},    {r.local + 14, 4},   {r.local + 18, 4},
      {r.local + 22, 4},   {r.local + 26, 2},   {r.local + 28, 2}};
  if (r.has_descriptor) {
    for (const size_t at : {0u, 4u, 8u, 12u}) fields.push_back({r.data + r.size + at, 4});
  }
  const Field f = dice.any(fields);
  set_number(s, f.at, f.width, dice.number(number_at(s, f.at, f.width)));
}

void mutate_content(const std::string& name, std::string& data, size_t most, Dice& dice) {
  if (name.ends_with(".pkl")) return mutate_pickle(data, most, dice);
  mutate_file(data, most, dice);
}

struct NewRecord {
  std::string name, data;
};

/// A sound zip, as small as one can be.
std::string zip_of(const std::vector<NewRecord>& records) {
  std::string out, directory;
  for (const NewRecord& r : records) {
    const uint32_t crc = crc32(0, r.data.data(), r.data.size());
    const std::string both = little_of(crc, 4) + little_of(r.data.size(), 4) +
                             little_of(r.data.size(), 4) + little_of(r.name.size(), 2);
    const std::string flags = little_of(0x0800, 2) + std::string(6, '\0');
    directory += little_of(kCentral, 4) + std::string(4, '\0') + flags + both +
                 std::string(12, '\0') + little_of(out.size(), 4) + r.name;
    out += little_of(kLocal, 4) + std::string(2, '\0') + flags + both + std::string(2, '\0') +
           r.name + r.data;
  }
  const std::string count = little_of(records.size(), 2);
  return out + directory + little_of(kEnd, 4) + std::string(4, '\0') + count + count +
         little_of(directory.size(), 4) + little_of(out.size(), 4) + std::string(2, '\0');
}

void mutate_records(std::string& s, const Zip& zip, size_t most, Dice& dice) {
  std::vector<NewRecord> records;
  for (const Record& r : zip.records) records.push_back({r.name, s.substr(r.data, r.size)});
  const size_t at = dice.below(records.size());
  NewRecord& record = records[at];
  switch (dice.below(8)) {
    case 0:
      records.erase(records.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1:
      records.push_back({record.name + "1", record.data});
      break;
    case 2:
      dice.bytes(record.name, record.name.size() + 4);
      break;
    case 3:
      std::swap(record.data, dice.any(records).data);
      break;
    default:
      mutate_content(record.name, record.data, most, dice);
  }
  std::string made = zip_of(records);
  if (made.size() <= most) s = std::move(made);
}

}  // namespace

void mutate_zip(std::string& input, size_t most, Dice& dice) {
  std::vector<Zip> zips;
  const std::string mark = little_of(kEnd, 4);
  for (size_t at = input.find(mark); at != std::string::npos; at = input.find(mark, at + 1)) {
    auto zip = zip_at(input, at);
    if (zip && !zip->records.empty()) zips.push_back(std::move(*zip));
  }
  if (zips.empty() || dice.one_in(50)) return mutate_bytes(input, most, dice);
  Zip& zip = dice.any(zips);
  Record& record = dice.any(zip.records);
  if (dice.one_in(4)) return mutate_field(input, zip, record, dice);
  if (zips.size() == 1 && zip.end + kEndSize == input.size() && dice.one_in(2))
    return mutate_records(input, zip, most, dice);
  std::string data = input.substr(record.data, record.size);
  mutate_content(record.name, data, record.size, dice);
  data.resize(record.size);
  input.replace(record.data, record.size, data);
  seal(input, record);
}

}  // namespace lowbit::ckpt
