// Targets of several files: checkpoint folders on disk and in a store, as entries.h lays them out.
#include <algorithm>
#include <vector>

#include "container/common/open.h"
#include "container/common/other_formats.h"
#include "container/dcp/recorded.h"
#include "container/dcp/value_archive.h"
#include "container/dcp/verified_reader.h"
#include "container/deepspeed/file_names.h"
#include "fuzz/common.h"
#include "fuzz/entries.h"
#include "io/glob.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

bool read_path(const std::string& path) {
  auto opened = open_checkpoint(path);
  if (!opened.ok()) return false;
  const bool pulled = pull(opened.value());
  static_cast<void>(understand(std::move(opened.value())));
  return pulled;
}

/// A box of a tensor, the whole or the part in the middle.
Box box_of(const Tensor& tensor, bool whole) {
  Box box{Shape(tensor.shape.size(), 0), tensor.shape};
  for (size_t d = 0; !whole && d < box.shape.size(); ++d) {
    box.offset[d] = tensor.shape[d] / 3;
    box.shape[d] = std::min<int64_t>(tensor.shape[d] - box.offset[d], tensor.shape[d] / 2 + 1);
  }
  return box;
}

}  // namespace

/// Any folder of files and links.
bool read_folder_on_disk(std::string_view input) {
  static const FolderOnDisk folder;
  return read_path(folder.hold(entries_of(input)));
}

/// The same in an object store, whose listing may say anything.
bool read_store(std::string_view input) { return read_path(in_store(entries_of(input))); }

/// Boxes of a directory's tensors and its values, as training resumes from them.
bool read_boxes(std::string_view input) {
  const auto manifest = read_dcp(in_store(entries_of(input)));
  if (!manifest.ok()) return false;
  const auto recorded = read_recorded(manifest.value());
  if (!recorded.ok()) return false;
  const Recorded* digests = recorded.value() ? &*recorded.value() : nullptr;
  PayloadCache cache;
  bool all = true;
  for (const bool verify : {true, false}) {
    VerifiedReader reader(manifest.value(), digests, verify, cache);
    for (const Tensor& tensor : manifest.value().tensors) {
      for (const bool whole : {false, true}) {
        const Box box = box_of(tensor, whole);
        if (volume(box.shape) > 1u << 14) continue;
        std::string out(volume(box.shape) * static_cast<uint64_t>(tensor.dtype->bytes), '\0');
        all = reader.read(tensor, box, out.data()).ok() && all;
      }
    }
    all = reader.finish().ok() && all;
  }
  for (const Blob& blob : manifest.value().blobs) {
    static_cast<void>(value_digest(manifest.value(), blob));
    const bool made = value_archive(manifest.value(), blob).ok();
    const bool checked = check_value_archive(manifest.value(), blob).ok();
    demand(made == checked, "a value is refused when it is checked, or is made an archive");
    all = made && all;
  }
  return all;
}

/// The names in a folder, one a line, and how a file begins that has the first of them.
bool read_name_and_head(std::string_view input) {
  constexpr size_t kHead = 512;
  std::vector<std::string> names;
  size_t at = 0;
  while (at < input.size() && input[at] != '\n') {
    const size_t end = std::min(input.find('\n', at), input.size());
    names.emplace_back(input.substr(at, end - at));
    at = end + 1;
  }
  if (names.empty()) return false;
  const std::string_view head = at < input.size() ? input.substr(at + 1, kHead) : "";
  const bool is_file = !check_other_file(names[0], head).ok();
  const bool is_folder =
      !check_other_folder("folder", names).ok() || !check_other_files("folder", names).ok();
  for (const std::string& name : names) {
    static_cast<void>(is_other_zip(name) || optimizer_file(name) || model_file(name));
    static_cast<void>(is_partial(name));
    static_cast<void>(glob_matches(names[0], name));
  }
  return is_file && is_folder;
}

}  // namespace lowbit::ckpt
