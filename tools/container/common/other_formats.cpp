#include "container/common/other_formats.h"

#include <algorithm>

#include "io/glob.h"
#include "io/text.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

/// What a folder is that has entries of both patterns; `second` may be null.
struct FolderKind {
  const char *first, *second, *is, *advice;
};

/// The surest first.
constexpr FolderKind kFolders[] = {
    {"latest_checkpointed_iteration.txt", "iter_*",
     "holds checkpoints of Megatron, one folder for each iteration",
     "give one of the folders iter_*, which latest_checkpointed_iteration.txt numbers"},
    {"iter_[0-9]*", nullptr, "holds checkpoints of Megatron, one folder for each iteration",
     "give one of the folders iter_*"},
    {"mp_rank_*", nullptr, "is a checkpoint of Megatron in its older format",
     "give one rank's file, such as mp_rank_00/model_optim_rng.pt; several ranks' files are not "
     "put "
     "together: load them with Megatron and save with --ckpt-format torch_dist"},
    {"common.pt", "metadata.json",
     "is a checkpoint of Megatron-Core without .metadata: of its older zarr format, or cut off",
     "load it with the Megatron that wrote it and save with --ckpt-format torch_dist"},
    {"weights", "context", "is a checkpoint of NeMo",
     "give the folder weights in it, which Megatron-Core wrote"},
    {"model_config.yaml", "model_weights", "is an unpacked checkpoint of NeMo",
     "give the folder model_weights in it"},
    {"model_config.yaml", "model_weights.ckpt", "is an unpacked checkpoint of NeMo",
     "give the file model_weights.ckpt in it, which has no optimizer"},
    {"pytorch_optim.bin.index.json", nullptr, "is an optimizer saved in parts by Colossal-AI",
     "load it with Colossal-AI and save it unsharded (save_optimizer(..., shard=False))"},
    {"pytorch_optim_group.bin", nullptr, "is an optimizer saved in parts by Colossal-AI",
     "load it with Colossal-AI and save it unsharded (save_optimizer(..., shard=False))"},
    {"*-model_part-*", nullptr,
     "holds one file for each model-parallel rank, as metaseq (OPT) does",
     "put them together with metaseq's scripts; each file by itself can be inspected"},
    {"consolidated.*.pth", nullptr,
     "holds one file of weights for each model-parallel rank, as Meta's models have",
     "give one of the files consolidated.NN.pth; there is no optimizer in them"},
    {"_CHECKPOINT_METADATA", nullptr, "is a checkpoint of Orbax (JAX)",
     "restore it with Orbax and save the arrays as safetensors (safetensors.flax.save_file)"},
    // Alone it is anybody's. Beside it Orbax has the arrays: in OCDBT, or each in a folder of its
    // own.
    {"_METADATA", "manifest.ocdbt", "is a checkpoint of Orbax (JAX)",
     "restore it with Orbax and save the arrays as safetensors (safetensors.flax.save_file)"},
    {"_METADATA", "?*.?*", "is a checkpoint of Orbax (JAX)",
     "restore it with Orbax and save the arrays as safetensors (safetensors.flax.save_file)"},
    {"*.orbax-checkpoint-tmp*", nullptr, "holds a save of Orbax (JAX) that did not finish",
     "restore an earlier one with Orbax and save the arrays as safetensors "
     "(safetensors.flax.save_file)"},
    {"checkpoint", "*.index", "is a checkpoint of TensorFlow",
     "load it with TensorFlow and save the variables as safetensors (safetensors.tensorflow)"},
    {"*.index", "*.data-[0-9]*-of-[0-9]*", "is a checkpoint of TensorFlow",
     "load it with TensorFlow and save the variables as safetensors (safetensors.tensorflow)"},
    {"checkpoint", "params.*", "is a checkpoint of an older Orbax (JAX)",
     "restore it with Orbax and save the arrays as safetensors (safetensors.flax.save_file)"},
    {"checkpoint", "target.*", "is a checkpoint of T5X (JAX)",
     "restore it with T5X and save the arrays as safetensors (safetensors.flax.save_file)"},
    {"saved_model.pb", "variables", "is a SavedModel of TensorFlow",
     "load it with TensorFlow and save the variables as safetensors (safetensors.tensorflow)"},
    {"model_world_size_*_rank_*.pt", nullptr,
     "holds one file for each rank, as verl does: DTensors, each with one rank's part",
     "train on with verl, or merge the weights with its model_merger (python -m "
     "verl.model_merger)"},
    {"actor", "data.pt", "is a checkpoint of verl, with one file for each rank in its folder actor",
     "train on with verl, or merge the weights with its model_merger (python -m "
     "verl.model_merger)"},
    {"optimizer_config.json", "optimizer_pp-*-of-*.pt",
     "is an optimizer of Nanotron, one file for each rank",
     "give the file where it is the only one; else resume on one rank with Nanotron, and save "
     "there"},
    {"checkpoint_metadata.json", "optimizer", "is a checkpoint of Nanotron",
     "give the folder optimizer in it, or a file of weights in the folder model"},
    {"*.pdparams", nullptr, "holds files of PaddlePaddle",
     "load them with paddle.load and save the arrays as safetensors"},
    {"*.pdopt", nullptr, "holds files of PaddlePaddle",
     "load them with paddle.load and save the arrays as safetensors"},
    {".snapshot_metadata", nullptr, "is a snapshot of torchsnapshot",
     "load it with torchsnapshot and save its state dicts with dcp.save"},
    {"*-shard[0-9]*.pt", nullptr,
     "holds one file for each rank's shard, as fairscale (fairseq) does",
     "put them together with the program that wrote them "
     "(FullyShardedDataParallel.consolidate_shard_weights)"},
    {"ep*-ba*-rank*", nullptr, "holds checkpoints of Composer, one file for each rank",
     "give rank 0's file where the model was not sharded; else load them with Composer and save "
     "with FSDP's state_dict_type 'full'"},
    {"*rank[_0-9]*.p[tk]*", nullptr, "holds one file for each rank",
     "no file is the whole: save with dcp.save, to which each rank gives its part, or put the "
     "files "
     "together with the program that wrote them"},
    {"epoch_*", "recipe_state", "is the output of torchtune",
     "give the file recipe_state/recipe_state.pt for the optimizer, or a folder epoch_N for "
     "weights"},
    {"hparams.yaml", "checkpoints", "is the log of a run of Lightning",
     "give a file .ckpt in the folder checkpoints"},
    {"lightning_logs", nullptr, "holds runs of Lightning",
     "give a file .ckpt, such as lightning_logs/version_0/checkpoints/NAME.ckpt"},
    {"*.ckpt", nullptr, "is a folder of checkpoint files, as Lightning writes them",
     "give one of the files .ckpt"},
    {"weights.npz", nullptr, "is a model of MLX in numpy's format",
     "load it with mlx.core.load and save it with mlx.core.save_safetensors"},
};

/// What a file is that begins so. In a folder its name tells; `named`: of a file by itself too.
struct FileKind {
  std::string_view begins;
  const char *name, *is, *advice;  // `name` may be null
  bool named = false;
};

constexpr const char* kNothingToTrain =
    "there is nothing in it to resume training from: take the checkpoint it was made from";
constexpr const char* kFromKeras = "load it with Keras and save the weights as safetensors";
constexpr const char* kFromPaddle = "load it with paddle.load and save the arrays as safetensors";
constexpr const char* kFromTensorFlow =
    "load the checkpoint with TensorFlow and save the variables as safetensors "
    "(safetensors.tensorflow)";
constexpr const char* kFromFlax =
    "load it with flax.serialization.msgpack_restore and save the arrays as safetensors "
    "(safetensors.flax.save_file)";

constexpr FileKind kFiles[] = {
    {"GGUF", "*.gguf", "is a GGUF file, weights for llama.cpp without an optimizer",
     kNothingToTrain},
    {"\x89HDF\r\n", "*.h5", "is an HDF5 file, such as Keras writes",
     "load it there and save the arrays as safetensors"},
    {"\x89HDF\r\n", "*.hdf5", "is an HDF5 file, such as Keras writes",
     "load it there and save the arrays as safetensors"},
    {"PK", "*.keras", "is a model of Keras", kFromKeras, true},
    {"PK", "*.npz", "is an archive of numpy's arrays",
     "load it with numpy (or MLX) and save it as safetensors", true},
    {"\x93NUMPY", "*.npy", "is an array of numpy", "load it with numpy and save it as safetensors"},
    {"\x80", "*.pdparams", "is a file of PaddlePaddle", kFromPaddle, true},
    {"\x80", "*.pdopt", "is a file of PaddlePaddle", kFromPaddle, true},
    {std::string_view("\0", 1), "*.index", "is one part of a checkpoint of TensorFlow",
     kFromTensorFlow, true},
    {"\x1f\x8b", nullptr, "is compressed with gzip",
     "unpack it (gunzip, or tar -xzf) and give what is in it"},
    {"BZh", nullptr, "is compressed with bzip2",
     "unpack it (bunzip2, or tar -xjf) and give what is in it"},
    {"\xfd"
     "7zXZ",
     nullptr, "is compressed with xz", "unpack it (unxz, or tar -xJf) and give what is in it"},
    {"\x28\xb5\x2f\xfd", nullptr, "is compressed with zstd",
     "unpack it (unzstd) and give what is in it"},
    {"7z\xbc\xaf\x27\x1c", nullptr, "is an archive of 7-Zip",
     "unpack it (7z x) and give what is in it"},
    {"<!DOCTYPE", nullptr, "is a web page, as a failed download leaves it",
     "download the file again"},
    {"<!doctype", nullptr, "is a web page, as a failed download leaves it",
     "download the file again"},
    {"<html", nullptr, "is a web page, as a failed download leaves it", "download the file again"},
    {"{", nullptr, "is JSON: a server's error instead of a download, or an index or configuration",
     "download the file again, or give the file that holds the tensors"},
    {"", "*.nemo", "is an archive of NeMo (a tar)", "unpack it (tar -xf) and give what is in it",
     true},
    {"", "*.onnx", "is a model of ONNX, without an optimizer", kNothingToTrain, true},
    {"", "*.tflite", "is a model of TensorFlow Lite, without an optimizer", kNothingToTrain, true},
    {"", "*.data-[0-9]*-of-[0-9]*", "is one part of a checkpoint of TensorFlow", kFromTensorFlow,
     true},
    {"", "*.msgpack", "is msgpack, such as Flax (JAX) writes", kFromFlax, true},
};

/// Whether a file begins as msgpack of a dict with a text for its first key.
bool is_msgpack(std::string_view head) {
  const auto at = [&](size_t i) { return i < head.size() ? static_cast<uint8_t>(head[i]) : 0; };
  if (at(0) < 0x81 || at(0) > 0x8f || at(1) < 0xa1 || at(1) > 0xbf) return false;
  const std::string_view key = head.substr(2, at(1) & 0x1f);
  return std::ranges::all_of(key, [](char c) { return c >= ' ' && c <= '~'; });
}

std::string last_name(const std::string& path) { return path.substr(parent_of(path).size()); }

bool has(const std::vector<std::string>& names, const char* pattern) {
  return std::ranges::any_of(names,
                             [&](const std::string& name) { return glob_matches(pattern, name); });
}

}  // namespace

Status check_other_folder(const std::string& folder, const std::vector<std::string>& names) {
  for (const FolderKind& kind : kFolders) {
    if (has(names, kind.first) && (kind.second == nullptr || has(names, kind.second)))
      return bad(printable(folder) + ": " + kind.is + "; " + kind.advice);
  }
  return fine();
}

Status check_other_files(const std::string& folder, const std::vector<std::string>& names) {
  for (const FileKind& kind : kFiles) {
    if (kind.name == nullptr) continue;
    const auto found = std::ranges::find_if(
        names, [&](const std::string& name) { return glob_matches(kind.name, name); });
    if (found != names.end())
      return bad(printable(folder) + ": holds " + printable(*found) + ", which " + kind.is + "; " +
                 kind.advice);
  }
  return fine();
}

bool is_other_zip(const std::string& path) {
  return std::ranges::any_of(kFiles, [&](const FileKind& kind) {
    return kind.begins == "PK" && glob_matches(kind.name, last_name(path));
  });
}

Status check_other_file(const std::string& path, std::string_view head) {
  for (const FileKind& kind : kFiles) {
    if (head.starts_with(kind.begins) && (!kind.named || glob_matches(kind.name, last_name(path))))
      return bad(printable(path) + ": " + kind.is + "; " + kind.advice);
  }
  if (is_msgpack(head))
    return bad(printable(path) + ": is msgpack, such as Flax (JAX) writes; " + kFromFlax);
  if (head.size() < 512 || head.substr(257, 5) != "ustar") return fine();
  const std::string_view first = head.substr(0, std::min<size_t>(head.find('\0'), 100));
  for (const char* member : {"sys_info", "pickle", "tensors", "storages"}) {
    if (first == member)
      return bad(printable(path) +
                 ": is a tar of torch before 0.1.10, which is not read; load and save it with that "
                 "torch");
  }
  return bad(printable(path) + ": is a tar; unpack it (tar -xf) and give what is in it");
}

}  // namespace lowbit::ckpt
