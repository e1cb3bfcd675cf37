"""CheckpointError.cause: what a training script may act on,
such as by continuing from an older checkpoint.
"""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import filesystem

from lowbit import checkpoint
from lowbit.checkpoint import CheckpointError

pytestmark = pytest.mark.usefixtures("ckpt")


def flipped(path, needle):
    content = bytearray(path.read_bytes())
    at = content.index(needle)
    content[at] ^= 1
    path.write_bytes(content)


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


VALUES = torch.arange(64, dtype=torch.float32)
NEEDLE = VALUES[40:44].numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    """A directory of one rank with digests."""
    dcp.save({"w": VALUES}, storage_writer=checkpoint.Writer(tmp_path / "run"))
    return tmp_path / "run"


def loaded(folder):
    state = {"w": torch.zeros(64)}
    dcp.load(state, storage_reader=checkpoint.Reader(folder), no_dist=True)
    return state["w"]


def cause_of_load(folder, said="", **given):
    state = {"w": torch.zeros(64)}
    with pytest.raises(dcp.api.CheckpointException, match=said) as caught:
        dcp.load(state, storage_reader=checkpoint.Reader(folder, **given))
    (error, _trace) = caught.value.failures[0]
    assert isinstance(error, CheckpointError), error
    assert pickle.loads(pickle.dumps(error)).cause == error.cause  # as ranks tell each other
    return error.cause


def test_values_that_are_not_what_was_saved(folder):
    flipped(folder / "__0_0.distcp", NEEDLE)
    assert cause_of_load(folder) == "damaged"


def test_values_without_digests(folder):
    (folder / "lowbit.json").unlink()
    flipped(folder / "__0_0.distcp", NEEDLE)
    assert cause_of_load(folder) == "damaged"


def test_a_directory_whose_file_is_cut_off(folder):
    """Of what is wrong with the metadata torch's own load keeps the text alone, from 2.13 on."""
    cut(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.Checkpoint(folder)
    assert caught.value.cause == "damaged"
    said = "the file is cut off" if torch.__version__ >= (2, 13) else "metadata is None"
    with pytest.raises(dcp.api.CheckpointException, match=said):
        dcp.load({"w": torch.zeros(64)}, storage_reader=checkpoint.Reader(folder))


@pytest.mark.parametrize("harm", [cut, lambda path: flipped(path, NEEDLE)], ids=["cut", "flipped"])
def test_a_file_of_torch_save(tmp_path, harm):
    source = tmp_path / "model.pt"
    torch.save({"w": VALUES}, source)
    harm(source)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.convert(source, tmp_path / "model.safetensors")
    assert caught.value.cause == "damaged"


def test_a_file_of_safetensors_that_is_cut_off(tmp_path):
    save_file({"w": VALUES}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut off") as caught:
        checkpoint.inspect(tmp_path / "model.safetensors")
    assert caught.value.cause == "damaged"


def test_digests_of_what_another_program_has_replaced(folder, tmp_path):
    """torch leaves lowbit.json where it was, beside a sound checkpoint of the same names, shapes
    and files.
    """
    shutil.copytree(folder, tmp_path / "copy")
    dcp.save({"w": VALUES + 1}, checkpoint_id=folder, no_dist=True)
    said = (
        "lowbit.json: is of another .metadata than lies beside it: another program has written "
        "this directory since, or .metadata is damaged; remove it"
    )
    assert cause_of_load(folder, said) == ""
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoint.verify(folder)
    assert (caught.value.cause, caught.value.code) == ("", 3)
    (folder / "lowbit.json").unlink()
    assert torch.equal(loaded(folder), VALUES + 1)
    assert torch.equal(loaded(tmp_path / "copy"), VALUES)


def test_digests_that_name_no_metadata(folder):
    """A file without that entry is held to nothing more."""
    recorded = json.loads((folder / "lowbit.json").read_text())
    assert len(recorded.pop("metadata")) == 32
    (folder / "lowbit.json").write_text(json.dumps(recorded))
    assert checkpoint.verify(folder)["ok"] and torch.equal(loaded(folder), VALUES)


def test_digests_of_more_bytes_than_the_checkpoint_can_have(folder):
    os.truncate(folder / "lowbit.json", 1 << 30)
    said = "more than the limit of .* for this checkpoint; remove it to go by the checksums"
    assert cause_of_load(folder, said) == "too large"


def test_metadata_that_is_cut_off(folder):
    cut(folder / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata") as caught:
        checkpoint.inspect(folder)
    assert caught.value.cause == "damaged"


def test_a_storage_of_an_old_file_that_is_cut_off(tmp_path):
    source = tmp_path / "model.pt"
    torch.save({"w": VALUES}, source, _use_new_zipfile_serialization=False)
    source.write_bytes(source.read_bytes()[:-8])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.inspect(source)
    assert caught.value.cause == "damaged"


def test_a_value_over_a_limit(tmp_path):
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(
            {"order": list(range(4_300_000))}, storage_writer=checkpoint.Writer(tmp_path / "run")
        )
    assert caught.value.failures[0][0].cause == "too large"


def test_items_in_safetensors(tmp_path):
    kind = getattr(filesystem, "SerializationFormat", None)
    if kind is None:
        pytest.skip("this torch has no SerializationFormat")
    writer = dcp.FileSystemWriter(tmp_path / "run", serialization_format=kind.SAFETENSORS)
    dcp.save({"w": VALUES, "lr": 0.5}, storage_writer=writer, no_dist=True)
    said = r"w at \[0\]: is an item in safetensors, .* SerializationFormat\.TORCH_SAVE"
    for work in (checkpoint.Checkpoint, checkpoint.verify):
        with pytest.raises(CheckpointError, match=said) as caught:
            work(tmp_path / "run")
        assert caught.value.cause == ""


def test_other_causes_are_not_told_apart(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.inspect(tmp_path / "model.pt")
    assert caught.value.cause == ""
