#include "container/common/other_formats.h"

#include <algorithm>

#include "io/glob.h"
#include "io/text.h"

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
    {"_METADATA", "manifest.ocdbt", "is a checkpoint of Orbax (JAX)",
     "restore it with Orbax and save the arrays as safetensors (safetensors.flax.save_file)"},
    {"checkpoint", "*.index", "is a checkpoint of TensorFlow",
     "load it with TensorFlow and save the variables as safetensors (safetensors.tensorflow)"},
    {"saved_model.pb", "variables", "is a SavedModel of TensorFlow",
     "load it with TensorFlow and save the variables as safetensors (safetensors.tensorflow)"},
    {"hparams.yaml", "checkpoints", "is the log of a run of Lightning",
     "give a file .ckpt in the folder checkpoints"},
    {"lightning_logs", nullptr, "holds runs of Lightning",
     "give a file .ckpt, such as lightning_logs/version_0/checkpoints/NAME.ckpt"},
    {"*.ckpt", nullptr, "is a folder of checkpoint files, as Lightning writes them",
     "give one of the files .ckpt"},
    {"weights.npz", nullptr, "is a model of MLX in numpy's format",
     "load it with mlx.core.load and save it with mlx.core.save_safetensors"},
    {"*.gguf", nullptr, "holds GGUF files, weights for llama.cpp without an optimizer",
     "there is nothing in them to go on training from: take the checkpoint they were made from"},
};

/// What a file is that begins so.
struct FileKind {
  std::string_view begins;
  const char *is, *advice;
};

constexpr FileKind kFiles[] = {
    {"GGUF", "is a GGUF file, weights for llama.cpp without an optimizer",
     "there is nothing in it to go on training from: take the checkpoint it was made from"},
    {"\x89HDF\r\n", "is an HDF5 file, such as Keras writes",
     "load it there and save the arrays as safetensors"},
    {"\x93NUMPY", "is an array of numpy", "load it with numpy and save it as safetensors"},
};

bool has(const std::vector<std::string>& names, const char* pattern) {
  return std::any_of(names.begin(), names.end(),
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

Status check_other_file(const std::string& path, std::string_view head) {
  for (const FileKind& kind : kFiles) {
    if (head.starts_with(kind.begins))
      return bad(printable(path) + ": " + kind.is + "; " + kind.advice);
  }
  if (path.ends_with(".nemo"))
    return bad(printable(path) +
               ": is an archive of NeMo (a tar); unpack it (tar -xf) and give what is in it");
  return fine();
}

}  // namespace lowbit::ckpt
