// Targets of what lies inside of another format.
#include <algorithm>
#include <string>

#include "container/common/open.h"
#include "container/dcp/value_archive.h"
#include "container/zip/zip.h"
#include "fuzz/common.h"
#include "io/read/zstd.h"

namespace lowbit::ckpt {
namespace {

bool read_archive(std::string_view input, const std::string& member) {
  auto manifest = read_torch_zip(named(input), member);
  if (!manifest.ok()) return false;
  auto document = document_of(std::make_shared<const Manifest>(std::move(manifest.value())));
  return document.ok() && pull(document.value());
}

}  // namespace

/// A zip whose first record that ends in ".pth" is a file of torch.save.
bool read_inner_zip(std::string_view input) {
  const auto file = File::of_bytes(input, kFuzz);
  if (!file.ok()) return false;
  const auto outer = read_loose_zip(*file.value(), kFuzz);
  if (!outer.ok()) return false;
  for (const ZipRecord& record : outer.value().records) {
    if (record.name.ends_with(".pth")) return read_archive(input, record.name);
  }
  return false;
}

/// A pickle of torch.save, in an archive with storages that no input needs to keep in order:
/// numpy's values, opaque objects and all other classes.
bool read_tree_pickle(std::string_view input) {
  constexpr size_t kStorage = 96;
  std::string made;
  Output out(&made);
  ZipWriter zip(out);
  bool written =
      zip.record("data.pkl", std::string(input)).ok() && zip.record("byteorder", "little").ok();
  for (const char* storage : {"data/0", "data/1", "data/2"})
    written = zip.record(storage, std::string(kStorage, '\x3f')).ok() && written;
  demand(written && zip.close().ok(), "an archive is written");
  return read_archive(made, "");
}

/// An item of a DCP directory with any value. What is made of it is a value again.
bool read_any_value(std::string_view input) {
  const auto file = File::of_bytes(input, kFuzz);
  if (!file.ok()) return false;
  const FileExtent all{0, 0, 0, input.size()};
  const auto made = value_archive(*file.value(), all, kFuzz);
  const bool checked = check_value_archive(*file.value(), all, kFuzz).ok();
  demand(checked || !made.ok(), "a value that is made an archive passes the check");
  if (!made.ok()) return false;
  const auto copy = File::of_bytes(made.value(), kFuzz);
  demand(copy.ok(), "bytes are a file");
  const auto again = value_archive(*copy.value(), FileExtent{0, 0, 0, made.value().size()}, kFuzz);
  demand(again.ok(), "an archive that was made is read");
  demand(again.value() == made.value(), "an archive comes back as it was");
  return true;
}

/// A frame of zstd behind a byte.
bool read_zstd(std::string_view input) {
  const auto file = File::of_bytes(input, kFuzz);
  if (!file.ok() || input.empty()) return false;
  constexpr uint64_t kLimit = 1u << 18;
  const auto head = zstd_beginning(*file.value(), 1, input.size() - 1, 64);
  const auto all = zstd_content(*file.value(), 1, input.size() - 1, kLimit, kFuzz);
  if (!all.ok()) return false;
  demand(all.value()->size() <= kLimit, "content keeps to its limit");
  demand(head.ok(), "content that is read has a beginning");
  std::string begin(std::min<uint64_t>(head.value().size(), all.value()->size()), '\0');
  demand(all.value()->read(0, begin.data(), begin.size()).ok() && begin == head.value(),
         "the beginning is that of the content");
  return true;
}

}  // namespace lowbit::ckpt
