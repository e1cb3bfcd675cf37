#include "container/zip/zip.h"

#include <libdeflate.h>
#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "container/zip/zip_layout.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMaxDirectory = 1ull << 28;

/// A little-endian reader over bytes; every read past the end gives 0 and sets `cut`.
struct Bytes {
  const std::string& s;
  size_t at = 0;
  bool cut = false;
  uint64_t take(int width) {
    if (s.size() - at < static_cast<size_t>(width)) {
      cut = true;
      return 0;
    }
    uint64_t n = 0;
    for (int i = 0; i < width; ++i)
      n |= static_cast<uint64_t>(static_cast<uint8_t>(s[at + static_cast<size_t>(i)])) << (8 * i);
    at += static_cast<size_t>(width);
    return n;
  }
  std::string text(size_t n) {
    if (s.size() - at < n) {
      cut = true;
      return {};
    }
    at += n;
    return s.substr(at - n, n);
  }
};

/// What the directory says of one record.
struct DirectoryEntry {
  std::string name;
  uint64_t flags, crc, size;
  uint64_t header;  // where the local header begins, from the archive's start
  bool compressed = false;
};

Result<DirectoryEntry> directory_entry(Bytes& b, const std::string& what) {
  if (b.take(4) != kCentral) return bad(what + ": the zip directory is broken");
  b.take(4);  // versions
  DirectoryEntry e;
  e.flags = b.take(2);
  const uint64_t method = b.take(2);
  b.take(4);  // time
  e.crc = b.take(4);
  uint64_t packed = b.take(4);
  e.size = b.take(4);
  const uint64_t name = b.take(2), extra = b.take(2), comment = b.take(2);
  b.take(2 + 2 + 4);
  e.header = b.take(4);
  e.name = b.text(name);
  const std::string extras = b.text(extra);
  b.text(comment);
  if (b.cut) return damaged(what + ": the zip directory ends inside an entry");
  Bytes x{extras};
  while (x.at < extras.size()) {
    const uint64_t id = x.take(2), length = x.take(2);
    const size_t end = x.at + length;
    if (id == 1) {
      if (e.size == kMax32) e.size = x.take(8);
      if (packed == kMax32) packed = x.take(8);
      if (e.header == kMax32) e.header = x.take(8);
      if (x.at > end) x.cut = true;
    }
    if (x.cut || end > extras.size())
      return bad(what + ": the zip directory has a broken extra field");
    x.at = end;
  }
  e.compressed = method != 0 || packed != e.size;
  if ((e.flags & ~0x0808ull) != 0)
    return bad(what + ": record " + printable(e.name) + " is encrypted or has unknown flags");
  return e;
}

/// Where the directory lies, by the zip64 end record or by the plain one.
struct Directory64 {
  uint64_t count, size, offset, end;  // end: where the directory must end
};

Result<Directory64> find_directory(const File& file, uint64_t base, uint64_t length,
                                   const std::string& what) {
  if (length < 22) return damaged(what + ": is too short for a zip");
  const uint64_t tail_size = std::min<uint64_t>(length, 22 + 20 + 56);
  std::string tail(tail_size, '\0');
  RETURN_IF_ERROR(file.read(base + length - tail_size, tail.data(), tail_size));
  Bytes e{tail, tail_size - 22};
  if (e.take(4) != kEnd)
    return damaged(what + ": does not end like a zip; it is cut off, or something follows it");
  if (e.take(2) != 0 || e.take(2) != 0) return bad(what + ": the zip has several volumes");
  const uint64_t here = e.take(2);
  Directory64 d{e.take(2), e.take(4), e.take(4), length - 22};
  if (e.take(2) != 0 || here != d.count)
    return bad(what + ": the zip has a comment, or counts its entries twice");
  if (tail_size == 98) {
    Bytes l{tail, 56};
    if (l.take(4) == kLocator64) {
      const uint64_t volume = l.take(4), at = l.take(8), volumes = l.take(4);
      Bytes z{tail};
      const bool whole = z.take(4) == kEnd64 && z.take(8) == 44;
      z.take(4);
      const uint64_t volume1 = z.take(4), volume2 = z.take(4), here64 = z.take(8);
      const Directory64 wide{z.take(8), z.take(8), z.take(8), length - 98};
      if (!whole || volume != 0 || volumes != 1 || volume1 != 0 || volume2 != 0 ||
          at != length - 98 || here64 != wide.count) {
        return bad(what + ": the zip64 end record is broken");
      }
      const auto agree = [](uint64_t narrow, uint64_t full, uint64_t limit) {
        return narrow == std::min(full, limit);
      };
      if (!agree(d.count, wide.count, 0xffff) || !agree(d.size, wide.size, kMax32) ||
          !agree(d.offset, wide.offset, kMax32)) {
        return bad(what + ": the zip's two end records disagree");
      }
      d = wide;
    }
  }
  if (d.offset > d.end || d.size != d.end - d.offset)
    return bad(what + ": the zip directory does not lie where it says");
  if (d.size > kMaxDirectory || d.count > d.size / 46)
    return bad(what + ": the zip directory has an impossible number of entries");
  return d;
}

/// Text, relative, and without a step upwards.
bool plain_name(const std::string& name) {
  if (!is_utf8(name, false) || name.find('\0') != std::string::npos || name.starts_with('/'))
    return false;
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('/', at), name.size());
    if (end == at || name.compare(at, end - at, "..") == 0) return false;
    at = end + 1;
  }
  return true;
}

/// Reads one archive, whose records must follow one another without a gap.
class ZipReader {
 public:
  ZipReader(const File& file, uint64_t base, const Directory64& directory, const std::string& what,
            bool loose = false)
      : file_(file), base_(base), directory_(directory), what_(what), loose_(loose) {}

  Result<ZipIndex> read() {
    ASSIGN_OR_RETURN(entries, read_directory());
    ZipIndex index;
    index.records.reserve(entries.size());
    if (!loose_) RETURN_IF_ERROR(check_one_folder(entries));
    for (const DirectoryEntry& e : entries) {
      ASSIGN_OR_RETURN(start, check_local_header(e));
      RETURN_IF_ERROR(check_name(e));
      index.has_crcs = index.has_crcs || e.crc != 0;
      index.records.push_back({loose_ ? e.name : e.name.substr(e.name.find('/') + 1), base_ + start,
                               e.size, static_cast<uint32_t>(e.crc)});
    }
    if (end_ != directory_.offset)
      return bad(what_ + ": the zip has bytes between its records and its directory");
    std::unordered_set<std::string_view> names;
    for (const ZipRecord& r : index.records) {
      if (!names.insert(r.name).second) return bad(what_ + ": the zip has two records of one name");
    }
    return index;
  }

 private:
  /// The directory's entries, in the order of their records.
  Result<std::vector<DirectoryEntry>> read_directory() const {
    std::string bytes(directory_.size, '\0');
    RETURN_IF_ERROR(file_.read(base_ + directory_.offset, bytes.data(), bytes.size()));
    Bytes b{bytes};
    std::vector<DirectoryEntry> entries;
    for (uint64_t i = 0; i < directory_.count; ++i) {
      ASSIGN_OR_RETURN(entry, directory_entry(b, what_));
      entries.push_back(std::move(entry));
    }
    if (b.at != bytes.size())
      return bad(what_ + ": the zip directory has bytes behind its entries");
    RETURN_IF_ERROR(check_method(entries));
    std::ranges::sort(entries, [](const DirectoryEntry& a, const DirectoryEntry& c) {
      return a.header < c.header;
    });
    return entries;
  }

  /// Nothing may be compressed. The code of a TorchScript program is.
  Status check_method(const std::vector<DirectoryEntry>& entries) const {
    const auto ends = [&](const char* name) {
      return std::ranges::any_of(entries, [&](const DirectoryEntry& e) {
        const size_t slash = e.name.find('/');
        return slash != std::string::npos && e.name.substr(slash + 1).starts_with(name);
      });
    };
    for (const DirectoryEntry& e : entries) {
      if (!e.compressed) continue;
      if (ends("code/") && ends("constants.pkl"))
        return bad(what_ +
                   ": is a TorchScript program, not a checkpoint; load it with torch.jit.load and "
                   "save its state_dict()");
      return bad(
          what_ + ": record " + printable(e.name) +
          " is compressed, which torch never writes; unzip it, and read the files inside, or zip "
          "them again without compression");
    }
    return fine();
  }

  /// Holds the local header and the descriptor against the directory. Returns where the data
  /// starts, and moves `end_` behind the record.
  Result<uint64_t> check_local_header(const DirectoryEntry& e) {
    const auto record = [&] { return name_of(e); };
    if (e.header != end_)
      return bad(record() + (e.header < end_ ? " overlaps another" : " leaves a gap"));
    std::string local(30, '\0');
    if (directory_.offset - e.header < 30 || e.header > directory_.offset)
      return bad(record() + " lies in the zip directory");
    RETURN_IF_ERROR(file_.read(base_ + e.header, local.data(), local.size()));
    Bytes l{local};
    const bool is_local = l.take(4) == kLocal;
    l.take(2);
    const uint64_t flags = l.take(2), method = l.take(2);
    l.take(4);
    const uint64_t crc = l.take(4), packed = l.take(4), size = l.take(4), name = l.take(2),
                   extra = l.take(2);
    const uint64_t start = e.header + 30 + name + extra;
    if (!is_local || method != 0 || flags != e.flags || name != e.name.size())
      return bad(record() + " has a local header that contradicts the directory");
    if (start > directory_.offset || e.size > directory_.offset - start)
      return bad(record() + " lies beyond the data");
    std::string local_name(name + extra, '\0');
    RETURN_IF_ERROR(file_.read(base_ + e.header + 30, local_name.data(), local_name.size()));
    const std::string extras = local_name.substr(name);
    local_name.resize(name);
    if (local_name != e.name)
      return bad(record() + " is called " + printable(local_name) + " by its local header");
    end_ = start + e.size;
    const bool late = (flags & 8) != 0;  // sizes and CRC follow the data
    const auto agrees = [late](uint64_t field, uint64_t value) {
      return field == value || (late && field == 0);
    };
    // Python's zipfile may write small sizes with 64 bits too.
    Bytes x{extras};
    const bool wide = size == kMax32 && packed == kMax32 && x.take(2) == 1 && x.take(2) == 16 &&
                      x.take(8) == e.size && x.take(8) == e.size && !x.cut;
    if (!agrees(crc, e.crc) || (!wide && !agrees(size, std::min(e.size, kMax32))) ||
        (!wide && !agrees(packed, std::min(e.size, kMax32))))
      return bad(record() + " has a local header that contradicts the directory");
    if (late) RETURN_IF_ERROR(check_descriptor(e));
    return start;
  }

  /// The descriptor behind the data, at `end_`.
  Status check_descriptor(const DirectoryEntry& e) {
    const int width = e.size >= kMax32 || e.header >= kMax32 ? 8 : 4;
    std::string trailer(static_cast<size_t>(8 + 2 * width), '\0');
    if (directory_.offset - end_ < trailer.size()) return bad(name_of(e) + " has no descriptor");
    RETURN_IF_ERROR(file_.read(base_ + end_, trailer.data(), trailer.size()));
    Bytes t{trailer};
    if (t.take(4) != kDescriptor || t.take(4) != e.crc || t.take(width) != e.size ||
        t.take(width) != e.size)
      return bad(name_of(e) + " has a descriptor that contradicts the directory");
    end_ += trailer.size();
    return fine();
  }

  /// A zip of several files is none of torch.save, but may hold some.
  Status check_one_folder(const std::vector<DirectoryEntry>& entries) const {
    constexpr size_t kShown = 5;
    std::string names;
    size_t count = 0;
    const DirectoryEntry* largest = nullptr;
    for (const DirectoryEntry& e : entries) {
      if (e.name.ends_with("/archive_format") || e.name == "serialized_exported_program.json")
        return bad(what_ +
                   ": is a program of torch.export, not a checkpoint; load it with "
                   "torch.export.load and save its state_dict");
      if (e.name == "data.pkl")
        return bad(what_ +
                   ": is an archive of torch.save that another program packed again, with its "
                   "records in no folder; torch does not read it: unzip it into a folder, and zip "
                   "that folder without compression");
      if (e.name.ends_with("/data.pkl") || e.name.ends_with("/constants.pkl")) return fine();
      if (e.name.ends_with(".pth") || e.name.ends_with(".pt")) {
        if (count++ < kShown) names += (names.empty() ? "" : ", ") + printable(e.name);
        if (largest == nullptr || e.size > largest->size) largest = &e;
      }
    }
    if (largest == nullptr) return fine();
    return bad(
        what_ +
        ": is a zip of several files, as stable-baselines writes, and no file of torch.save; "
        "it holds " +
        names + (count > kShown ? ", ..." : "") + "; read one as a path: " + what_ + "/" +
        printable(largest->name));
  }

  /// All records lie in one folder, and none leads out of it.
  Status check_name(const DirectoryEntry& e) {
    if (loose_) {
      return plain_name(e.name) ? fine()
                                : Status(bad(what_ + ": the record name " + printable(e.name) +
                                             " leads out of the archive"));
    }
    const size_t slash = e.name.find('/');
    if (slash == std::string::npos || slash == 0) return bad(name_of(e) + " lies in no folder");
    if (!plain_name(e.name))
      return bad(what_ + ": the record name " + printable(e.name) + " leads out of the archive");
    if (folder_.empty()) folder_ = e.name.substr(0, slash);
    if (e.name.compare(0, slash, folder_) != 0)
      return bad(name_of(e) + " lies in another folder than the rest");
    return fine();
  }

  std::string name_of(const DirectoryEntry& e) const {
    return what_ + ": record " + printable(e.name);
  }

  const File& file_;
  const uint64_t base_;
  const Directory64 directory_;
  const std::string& what_;
  const bool loose_;
  std::string folder_;
  uint64_t end_ = 0;  // of the record before, from the archive's start
};

}  // namespace

Result<ZipIndex> read_zip(const File& file, uint64_t base, uint64_t length,
                          const std::string& what) {
  if (base > file.size() || length > file.size() - base)
    return bad(what + ": lies beyond the end of " + file.name());
  ASSIGN_OR_RETURN(directory, find_directory(file, base, length, what));
  return ZipReader(file, base, directory, what).read();
}

Result<ZipIndex> read_loose_zip(const File& file, const std::string& what) {
  ASSIGN_OR_RETURN(directory, find_directory(file, 0, file.size(), what));
  return ZipReader(file, 0, directory, what, true).read();
}

const ZipRecord* ZipIndex::find(const std::string& name) const {
  for (const ZipRecord& r : records) {
    if (r.name == name) return &r;
  }
  return nullptr;
}

Status check_crc(const File& file, const ZipIndex& index, const ZipRecord& record,
                 const std::string& what) {
  if (!index.has_crcs) return fine();
  std::string buffer(std::min<uint64_t>(record.size, 1u << 20), '\0');
  uint32_t crc = 0;
  for (uint64_t at = 0; at < record.size; at += buffer.size()) {
    const uint64_t n = std::min<uint64_t>(buffer.size(), record.size - at);
    RETURN_IF_ERROR(file.read(record.offset + at, buffer.data(), n));
    crc = libdeflate_crc32(crc, buffer.data(), n);
  }
  return crc == record.crc
             ? fine()
             : Status(damaged(what + ": the checksum of its record " + printable(record.name) +
                              " is wrong: the file is damaged"));
}

}  // namespace lowbit::ckpt
