"""Folders and files of other programs: whose they are, and what to do."""

import pytest
import torch

from tests.support.peers.files import need_tool, run

need_tool()

FOLDERS = {
    "of Megatron, one folder for each": ["latest_checkpointed_iteration.txt", "iter_0000010/"],
    "give one of the folders iter_": ["iter_0000010/"],
    "of verl, with one file for each rank in its folder actor": ["actor/", "data.pt"],
    "is a checkpoint of Nanotron": ["checkpoint_metadata.json", "model/", "optimizer/"],
    "an optimizer of Nanotron, one file for each rank": [
        "optimizer_config.json",
        "optimizer_pp-0-of-1_dp-0-of-2_tp-0-of-1_exp-0-of-1.pt",
        "optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-1_exp-0-of-1.pt",
    ],
    "PaddlePaddle": ["model.pdparams", "model.pdopt"],
    "is not a checkpoint of a kind that is known here (it holds ": ["notes.txt", "b/", "c.dat"],
    "and 2 more); give the folder of one save": [f"{i}.dat" for i in range(7)],
    "of Megatron in its older format": ["mp_rank_00/", "mp_rank_01/"],
    "Megatron-Core without .metadata": ["common.pt", "metadata.json"],
    "is a checkpoint of NeMo": ["weights/", "context/"],
    "give the folder model_weights": ["model_config.yaml", "model_weights/"],
    "give the file model_weights.ckpt": ["model_config.yaml", "model_weights.ckpt"],
    "Colossal-AI": ["pytorch_optim.bin.index.json", "pytorch_optim-00001.bin"],
    "shard=False": ["pytorch_optim_group.bin"],
    "metaseq (OPT)": ["reshard-model_part-0.pt", "reshard-model_part-1.pt"],
    "Meta's models": ["consolidated.00.pth", "consolidated.01.pth", "params.json"],
    "safetensors.flax": ["_CHECKPOINT_METADATA", "default/"],
    "Orbax": ["_METADATA", "manifest.ocdbt", "d/"],
    "checkpoint of Orbax (JAX); restore": ["_METADATA", "params.w/", "opt.mu/"],
    "known here (it holds _METADATA)": ["_METADATA"],
    "known here (it holds _METADATA, notes": ["_METADATA", "notes"],
    "Orbax (JAX), one folder for each step; restore": ["0/", "0/_CHECKPOINT_METADATA", "100/"],
    "one folder for each step; restore one": ["default/", "default/_METADATA", "default/d/"],
    "save of Orbax (JAX) that did not finish": ["100.orbax-checkpoint-tmp-17/"],
    "older Orbax": ["checkpoint", "params.w/"],
    "T5X": ["checkpoint", "target.w/"],
    "holds flax_model.msgpack, which is msgpack": ["flax_model.msgpack", "config.json"],
    "safetensors.tensorflow": ["m.ckpt-1.data-00000-of-00001", "m.ckpt-1.index", "m.ckpt-1.meta"],
    "holds a.keras, which is a model of Keras": ["a.keras"],
    "holds m.weights.h5, which is an HDF5 file": ["m.weights.h5", "notes.txt"],
    "which is an HDF5 file, such as Keras": ["a.hdf5"],
    "load them with paddle.load": ["model.pdopt"],
    "holds a.nemo, which is an archive of NeMo": ["a.nemo"],
    "holds model.onnx, which is a model of ONNX": ["model.onnx", "model.onnx.data"],
    "holds a.npz, which is an archive of numpy's": ["a.npz"],
    "holds a.npy, which is an array of numpy": ["a.npy", "b.npy"],
    "torchsnapshot": [".snapshot_metadata", "0/"],
    "is a checkpoint of TensorFlow": ["checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"],
    "SavedModel": ["saved_model.pb", "variables/"],
    "log of a run of Lightning": ["hparams.yaml", "checkpoints/"],
    "runs of Lightning": ["lightning_logs/"],
    "as Lightning writes them": ["epoch=1-step=20.ckpt", "last.ckpt"],
    "MLX": ["weights.npz", "config.json"],
    "GGUF": ["model-q4.gguf"],
    "verl.model_merger": [
        "model_world_size_2_rank_0.pt",
        "optim_world_size_2_rank_0.pt",
        "huggingface/",
    ],
    "Composer": ["ep0-ba10-rank0.pt", "ep0-ba10-rank1.pt"],
    "holds one file for each rank; no file is the whole": ["rank_0.pt", "rank_1.pt"],
    "each rank; no file": ["checkpoint-rank0.pth", "checkpoint-rank1.pth"],
    "fairscale": ["checkpoint_last-shard0.pt", "checkpoint_last-shard1.pt"],
    "recipe_state/recipe_state.pt": ["epoch_0/", "recipe_state/"],
    "one of them: a.pt, b.pt": ["a.pt", "b.pt", "notes.txt"],
    "give it: model.pth": ["model.pth"],
    "and 2 more": [f"{i}.pt" for i in range(7)],
    "one model in several files": [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ],
    "max_shard_size": ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
}
FILES = {
    "a.gguf": (b"GGUF\x03\x00\x00\x00", "for llama.cpp"),
    "a.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "a.npy": (b"\x93NUMPY\x01\x00", "array of numpy"),
    "a.nemo": (b"./".ljust(257, b"\0") + b"ustar\x0000", "archive of NeMo"),
    "a.tar": (b"x.pt".ljust(257, b"\0") + b"ustar\x0000", "is a tar; unpack it"),
    "old.pt": (b"storages".ljust(257, b"\0") + b"ustar\x0000", "torch before 0.1.10"),
    "a.keras": (b"PK\x03\x04", "model of Keras"),
    "a.onnx": (b"\x08\x08\x12\x07pytorch", "model of ONNX"),
    "a.tflite": (b"\x20\0\0\0TFL3", "TensorFlow Lite"),
    "a.pdparams": (b"\x80\x04\x95", "PaddlePaddle"),
    "a.pdopt": (b"\x80\x02}", "PaddlePaddle"),
    "a.index": (b"\0\0\x06\x08\x01", "part of a checkpoint of TensorFlow"),
    "a.data-00000-of-00001": (b"\x3f\x80", "part of a checkpoint of TensorFlow"),
    "checkpoint": (b"\x82\xa4step\x01\xa6params\x80", "is msgpack, such as Flax (JAX) writes"),
    "a.msgpack": (b"\xde\0\x10\xa1a", "is msgpack, such as Flax (JAX) writes"),
    "a.npz": (b"PK\x03\x04", "archive of numpy's arrays"),
    "a.pt.gz": (b"\x1f\x8b\x08\x08", "compressed with gzip"),
    "a.pt.bz2": (b"BZh91AY&SY", "compressed with bzip2"),
    "a.pt.xz": (b"\xfd7zXZ\0", "compressed with xz"),
    "a.pt.zst": (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c", "archive of 7-Zip"),
    "page.pt": (b"<!DOCTYPE html><html>", "failed download"),
    "error.pt": (b'{"error":"Repository not found"}', "a server's error instead of a download"),
}


@pytest.mark.parametrize("said", FOLDERS)
def test_folders(tmp_path, said):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in FOLDERS[said]:
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(b"x")
    for command in (
        ["inspect", folder],
        ["convert", folder, tmp_path / "out.pt", "--to", "lowbit"],
    ):
        error = run(*command, code=3).stderr
        assert said in error and str(folder) in error and "; " in error and error.count("\n") == 1
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("file", ["mp_rank_00", "zero_pp_rank_0_mp_rank_00"])
def test_a_folder_of_saves_of_deepspeed_without_its_script(tmp_path, file):
    """Without ZeRO, DeepSpeed puts no zero_to_fp32.py beside them."""
    (tmp_path / "step3").mkdir()
    (tmp_path / "step3" / f"{file}_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("step3")
    error = run("inspect", tmp_path, code=3).stderr
    assert "holds checkpoints of DeepSpeed, each a folder; the last one is step3" in error


def test_an_empty_folder(tmp_path):
    error = run("inspect", tmp_path, code=3).stderr
    assert error == f"lowbit-ckpt: {tmp_path}: is an empty folder\n"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model.safetensors", "model.gguf"], "give one of them: model.safetensors"),
        (["step-1/", "step-1/.metadata", "last.ckpt"], "give one of them: step-1"),
        (["data.h5", "model.pt"], "but holds a file; give it: model.pt"),
        (["model.onnx", "a.pth", "b.pth"], "give one of them: a.pth, b.pth"),
    ],
)
def test_a_file_that_is_read_is_named_first(tmp_path, names, said):
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(b"x")
    assert said in run("inspect", tmp_path, code=3).stderr


@pytest.mark.parametrize("name", ["a.onnx", "a.pdparams", "a.msgpack", "checkpoint"])
@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_wrote_is_read_whatever_its_name_is(tmp_path, name, legacy):
    torch.save({"w": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    assert "1 tensor" in run("inspect", tmp_path / name).stdout


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    head, said = FILES[name]
    (tmp_path / name).write_bytes(head.ljust(600, b"\0"))
    error = run("inspect", tmp_path / name, code=3).stderr
    assert said in error and name in error
