#include "container/common/open.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "container/common/archive.h"
#include "container/common/json_value.h"
#include "container/common/other_formats.h"
#include "io/read/open.h"
#include "io/read/store.h"
#include "io/text.h"
#include "io/write/checkpoint_folder.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

/// The pickle of torch's magic number, with which files of the old format start.
constexpr std::string_view kLegacyMagic("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", 15);

/// How a file begins like safetensors: the length of a JSON object, and then the object, which may
/// have spaces before it. kWhole: the file is long enough for such a header. kSurelyCutOff: it is
/// not, and of no other kind, whose magic number the length's lowest bytes may be (123 is a JSON's
/// '{').
enum class Safetensors : uint8_t { kNo, kCutOff, kSurelyCutOff, kWhole };
Safetensors safetensors_of(std::string_view head, uint64_t size) {
  uint64_t length = 0;
  if (head.size() <= sizeof length) return Safetensors::kNo;
  std::memcpy(&length, head.data(), sizeof length);
  if (length >> 48 != 0 || std::string_view("{ \t\n\r").find(head[8]) == std::string_view::npos)
    return Safetensors::kNo;
  if (length <= size - sizeof length) return Safetensors::kWhole;
  constexpr uint64_t kUsual = 1u << 24;  // so that five bytes of the length are zeros
  return length < kUsual && head[8] == '{' ? Safetensors::kSurelyCutOff : Safetensors::kCutOff;
}

/// Whether a file begins as pickles of Python 2 do, or those of protocol 0 and 1.
bool is_old_pickle(std::string_view head) {
  for (const std::string_view start :
       {"(dp", "(lp", "(ip", "ccopy_reg\n", "ccopyreg\n", "cnumpy", "c__main__\n", "}q", "]q"}) {
    if (head.starts_with(start)) return true;
  }
  return false;
}

/// A file of a directory of torch.distributed.checkpoint is not a checkpoint by itself.
Status check_no_part(const std::string& path) {
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  if (!is_dcp_file(name)) return fine();
  if (!name.ends_with(".metadata") && !is_file(parent + ".metadata")) return fine();
  return bad(printable(path) +
             ": is one file of a directory of torch.distributed.checkpoint; give the folder: " +
             (parent.empty() ? "." : printable(parent.substr(0, parent.size() - 1))));
}

Result<Manifest> read_file(const std::string& path) {
  RETURN_IF_ERROR(check_no_part(path));
  std::string head(512, '\0');
  uint64_t size = 0;
  {
    ASSIGN_OR_RETURN(archive, Archive::open(path));
    ASSIGN_OR_RETURN(file, archive->file());
    size = file->size();
    if (size == 0) return bad(archive->what() + ": is empty");
    head.resize(std::min<uint64_t>(head.size(), size));
    RETURN_IF_ERROR(file->read(0, head.data(), head.size()));
  }
  const std::string what = printable(path);
  // Before the others: its first bytes are a length, which may be any magic number.
  const Safetensors safetensors = safetensors_of(head, size);
  if (safetensors == Safetensors::kWhole || safetensors == Safetensors::kSurelyCutOff)
    return read_safetensors(path);  // which tells what is cut off
  if (head.starts_with("PK") && !is_other_zip(path)) return read_torch_zip(path);
  if (head.starts_with(kLegacyMagic)) return read_torch_legacy(path);
  if (head.starts_with("version https://git-lfs"))
    return bad(what + ": is a pointer of Git LFS, not the file itself; `git lfs pull` fetches it");
  RETURN_IF_ERROR(check_other_file(path, head));
  if (is_old_pickle(head) ||
      (head.starts_with("\x80") && head.size() > 1 && static_cast<uint8_t>(head[1]) <= 5))
    return bad(what +
               ": is a pickle, but not of torch.save, and may hold anything; load it where it was "
               "written, and save its state dicts with torch.save");
  if (safetensors == Safetensors::kCutOff) return read_safetensors(path);  // which says so
  return bad(what + ": is neither a file of torch.save nor of safetensors (it starts with '" +
             printable(head.substr(0, 8)) + "')");
}

/// The folder that the last save of DeepSpeed went to, by its file `latest`; empty where there is
/// none.
std::string last_saved(const Directory& folder) {
  if (!folder.has("latest")) return "";
  const auto tag = folder.content("latest", 1u << 10);
  std::string last = tag.ok() ? tag.value() : "";
  while (last.ends_with(' ') || last.ends_with('\n')) last.pop_back();
  return is_entry_name(last) ? last : "";
}

/// Whether the folder `last` in a folder is a save of DeepSpeed: without ZeRO nothing else tells.
bool has_deepspeed(const Directory& folder, const std::string& last) {
  if (last.empty()) return false;
  for (const char* model : {"mp_rank_00", "zero_pp_rank_0_mp_rank_00"}) {
    if (is_file(folder.path() + "/" + last + "/" + model + "_model_states.pt")) return true;
  }
  return false;
}

/// How a folder of DeepSpeed lies on disk, by the names in it (those of 0.19.8); none where it is
/// none of its folders, and an error where it is one that is not read.
Result<std::optional<ContainerKind>> kind_of_deepspeed(const Directory& folder,
                                                       const std::vector<std::string>& names) {
  const std::string what = printable(folder.path());
  // It has a copy of the model's files too.
  if (folder.has("zero") && is_file(folder.path() + "/zero/optimizer_state.pt"))
    return std::optional(ContainerKind::kUniversal);
  std::string models;
  for (const std::string& name : names) {
    if (name.find("zero_pp_rank_") != std::string::npos && name.ends_with("_optim_states.pt"))
      return std::optional(ContainerKind::kZero);
    if (name.starts_with("mp_rank_") && name.ends_with("_model_states.pt"))
      models += (models.empty() ? "" : ", ") + printable(name);
  }
  if (!models.empty())
    return bad(what +
               ": is a checkpoint of DeepSpeed, without ZeRO; give one of its files: " + models);
  const std::string last = last_saved(folder);
  if (folder.has("latest") && (folder.has("zero_to_fp32.py") || has_deepspeed(folder, last)))
    return bad(what + ": holds checkpoints of DeepSpeed, each a folder" +
               (last.empty() ? "" : "; the last one is " + printable(last)));
  return std::optional<ContainerKind>();
}

/// Whether the folders in a folder are saves of Orbax, which are named by their steps or `default`.
bool has_orbax_steps(const std::string& path, const std::vector<std::string>& names) {
  int looks = 0;
  for (const std::string& name : names) {
    if (name.starts_with('.')) continue;
    constexpr int kLooks = 8;
    if (looks++ >= kLooks) return false;
    for (const char* file : {"/_CHECKPOINT_METADATA", "/_METADATA"}) {
      if (is_file(path + "/" + name + file)) return true;
    }
  }
  return false;
}

/// Of a folder of which nothing else is known: names its files that may be checkpoints, else what
/// it holds.
Error unknown_folder(const std::string& path, const std::vector<std::string>& names) {
  const std::string what = printable(path);
  std::vector<std::string> files, entries;
  for (const std::string& name : names) {
    if (name == "." || name == "..") continue;
    entries.push_back(name);
    if (name.ends_with(".pt") || name.ends_with(".pth") || name.ends_with(".bin"))
      files.push_back(name);
  }
  if (entries.empty()) return bad(what + ": is an empty folder");
  if (!files.empty())
    return bad(what +
               (files.size() == 1 ? ": is not a checkpoint, but holds a file; give it: "
                                  : ": is a folder of several files; give one of them: ") +
               some_of(files, 5));
  if (const Status other = check_other_files(path, names); !other.ok()) return other.error();
  if (has_orbax_steps(path, names))
    return bad(what +
               ": holds checkpoints of Orbax (JAX), one folder for each step; restore one with "
               "Orbax and save the arrays as safetensors (safetensors.flax.save_file)");
  return bad(what + ": is not a checkpoint of a kind that is known here (it holds " +
             some_of(entries, 5) +
             "); give the folder of one save, or a file of torch.save or safetensors; else load "
             "it with the program that wrote it, and save its state dicts with torch.save or "
             "dcp.save");
}

/// How a folder lies on disk, an error where it is not a checkpoint by itself.
Result<ContainerKind> kind_of_folder(const std::string& path) {
  ASSIGN_OR_RETURN(folder, open_folder(path));
  ASSIGN_OR_RETURN(names, folder->list());
  std::string files, folders;
  int looks = 0;
  for (const std::string& name : names) {
    if (name.ends_with(".metadata") || name.ends_with(".distcp")) return ContainerKind::kDcp;
    const bool known = name == "optimizer.pt" || name == "optimizer.bin" ||
                       name.ends_with(".safetensors") || name == "pytorch_model.bin" ||
                       name.starts_with("pytorch_model-");
    if (known) files += (files.empty() ? "" : ", ") + printable(name);
    // Each look into an object store is a request: the first few folders are enough of an example.
    constexpr int kLooks = 8;
    if (is_url(path) && (folder->file(name).ok() || looks++ >= kLooks)) continue;
    if (is_file(path + "/" + name + "/.metadata"))
      folders += (folders.empty() ? "" : ", ") + printable(name);
  }
  const std::string what = printable(path);
  const bool trainer = folder->has("optimizer.pt") || folder->has("trainer_state.json");
  if (const std::string last = last_saved(*folder); trainer && !last.empty())
    folders += (folders.empty() ? "" : ", ") + printable(last);
  if (trainer)
    return bad(what +
               ": is a checkpoint folder of a Trainer, of several files; give one of them: " +
               (files.empty()     ? folders
                : folders.empty() ? files
                                  : files + ", " + folders));
  ASSIGN_OR_RETURN(deepspeed, kind_of_deepspeed(*folder, names));
  if (deepspeed) return *deepspeed;
  if (!folders.empty())
    return bad(what + ": is not a checkpoint, but holds some; give one of them: " + folders);
  const bool sharded =
      folder->has("model.safetensors.index.json") || folder->has("pytorch_model.bin.index.json");
  if (sharded && !files.empty())
    return bad(what +
               ": is one model in several files, each with some of its tensors; give one of them, "
               "or save the model in one (save_pretrained with a larger max_shard_size): " +
               files);
  if (!files.empty())
    return bad(what + ": is a folder of several files; give one of them: " + files);
  // Last: what is read goes before what another program left beside it.
  RETURN_IF_ERROR(check_other_folder(path, names));
  return unknown_folder(path, names);
}

Result<Manifest> read_folder(const std::string& path) {
  if (is_partial(path))
    return bad(printable(path) +
               ": was left by a program that was killed while it wrote; delete it");
  ASSIGN_OR_RETURN(kind, kind_of_folder(path));
  if (kind == ContainerKind::kZero) return read_zero(path);
  return kind == ContainerKind::kUniversal ? read_universal(path) : read_dcp(path);
}

/// Whether Megatron-Core wrote a directory of DCP: its metadata.json names the backend (0.16.1,
/// dist_checkpointing/core.py). Others may have files of both names.
bool is_of_megatron(const Directory& folder) {
  if (!folder.has("common.pt") || !folder.has("metadata.json")) return false;
  const auto text = folder.content("metadata.json", 1u << 16);
  if (!text.ok()) return false;
  const auto said = parse_json(text.value(), 1u << 10, "metadata.json");
  return said.ok() && said.value().is_dict() && said.value().find("sharded_backend") != nullptr;
}

/// What Megatron-Core keeps of a checkpoint beside its tensors; null where there is nothing.
Result<std::shared_ptr<const Document>> common_state(const Document& document,
                                                     std::shared_ptr<Directory> folder) {
  std::shared_ptr<const Document> none;
  if (is_of_megatron(*folder)) {
    ASSIGN_OR_RETURN(archive, Archive::open(folder, "common.pt"));  // follows no link
    ASSIGN_OR_RETURN(read, read_torch_zip(archive));
    ASSIGN_OR_RETURN(common, document_of(std::make_shared<Manifest>(std::move(read))));
    return std::shared_ptr<const Document>(std::make_shared<Document>(std::move(common)));
  }
  const Manifest& all = *document.manifest;
  const auto blob = std::ranges::find_if(
      all.blobs, [](const Blob& b) { return b.name == Document::kCommonItem; });
  if (blob == all.blobs.end()) return none;
  RETURN_IF_ERROR(check_single(*blob));
  const std::string& file = all.file_names[blob->extent.file];
  if (blob->extent.transform != 0)
    return bad(printable(all.path + "/" + file) + ": " + printable(blob->name) +
               " is compressed, which Megatron-Core does not write; save it again without");
  ASSIGN_OR_RETURN(archive, Archive::open(folder, file));
  // A list of one dict; anything else of that name is from another program, and stays an item.
  auto read = read_torch_item(archive, blob->extent);
  if (!read.ok()) {
    if (read.error().cause == Cause::kDamaged) return read.error();
    return none;
  }
  ASSIGN_OR_RETURN(common, document_of(std::make_shared<Manifest>(std::move(read.value()))));
  for (Leaf& leaf : common.leaves) {
    if (leaf.path.size() < 2 || leaf.path[0] != place(0) ||
        leaf.path[1].kind == Key::Kind::kIndex || leaf.path[1].kind == Key::Kind::kTupleIndex)
      return none;
    leaf.path.erase(leaf.path.begin());
  }
  return std::shared_ptr<const Document>(std::make_shared<Document>(std::move(common)));
}

/// "OUTER.zip/INNER.pth" as the path of the zip and the name of the record; empty for other paths.
std::pair<std::string, std::string> member_of(const std::string& path) {
  for (size_t slash = path.rfind('/'); slash != std::string::npos && slash > 0;
       slash = path.rfind('/', slash - 1)) {
    const std::string outer = path.substr(0, slash);
    if (outer.ends_with('/')) break;  // of "s3://"
    const auto kind = path_kind(outer);
    if (!kind.ok() || kind.value() == PathKind::kMissing) continue;
    if (kind.value() == PathKind::kFile) return {outer, path.substr(slash + 1)};
    break;
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<const Manifest>> read_manifest(const std::string& path) {
  if (path.empty()) return usage("the path of a checkpoint is empty");
  ASSIGN_OR_RETURN(kind, path_kind(path));
  if (kind == PathKind::kMissing && path == "-")
    return bad("-: a checkpoint is not read from standard input; write it to a file first");
  if (kind == PathKind::kMissing) {
    const int why = errno;
    std::pair<std::string, std::string> found;
    if (why == ENOTDIR || is_url(path)) found = member_of(path);
    const auto& [outer, member] = found;
    errno = why;
    if (member.empty()) return not_opened("cannot open " + printable(path));
    ASSIGN_OR_RETURN(manifest, read_torch_zip(outer, member));
    return std::shared_ptr<const Manifest>(std::make_shared<Manifest>(std::move(manifest)));
  }
  if (kind == PathKind::kPipe)
    return bad(printable(path) +
               ": is a pipe, not a regular file: a checkpoint is read here and there; write it to "
               "a file first");
  if (kind != PathKind::kFolder && is_partial(path))
    return bad(printable(path) +
               ": was left by a program that was killed while it wrote; delete it");
  ASSIGN_OR_RETURN(manifest, kind == PathKind::kFolder ? read_folder(path) : read_file(path));
  return std::shared_ptr<const Manifest>(std::make_shared<Manifest>(std::move(manifest)));
}

Result<Document> open_checkpoint(const std::string& path) {
  ASSIGN_OR_RETURN(manifest, read_manifest(path));
  const bool directory = manifest->kind == ContainerKind::kDcp;
  ASSIGN_OR_RETURN(document, document_of(std::move(manifest)));
  if (!directory) return document;
  ASSIGN_OR_RETURN(folder, open_folder(path));
  ASSIGN_OR_RETURN(common, common_state(document, folder));
  if (common == nullptr) return document;
  document.others.push_back(common->manifest);
  document.common = std::move(common);
  return document;
}

}  // namespace lowbit::ckpt
