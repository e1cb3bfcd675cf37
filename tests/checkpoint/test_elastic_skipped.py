"""What elastic.latest says of checkpoints that it skips: a run must not begin anew in silence."""

import pathlib
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint, elastic

pytestmark = pytest.mark.usefixtures("ckpt")


def save(folder, step):
    path = elastic.step_folder(folder, step)
    dcp.save({"w": torch.ones(9)}, storage_writer=checkpoint.Writer(path), no_dist=True)
    return path


def links(folder, step, source):
    """A checkpoint that torch reads and lowbit refuses."""
    path = elastic.step_folder(folder, step)
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)


def test_a_checkpoint_that_is_not_read_is_named(tmp_path):
    whole = save(tmp_path, 1)
    links(tmp_path, 2, whole)
    with pytest.warns(UserWarning, match=r"step-00000002 is skipped: .*is a link"):
        assert elastic.latest(tmp_path) == whole


def test_a_run_does_not_begin_anew_beside_a_checkpoint_that_is_not_read(tmp_path):
    save(tmp_path / "elsewhere", 1)
    links(tmp_path, 2, elastic.step_folder(tmp_path / "elsewhere", 1))
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(checkpoint.CheckpointError, match="is a link"),
    ):
        elastic.latest(tmp_path)


def test_damaged_and_unfinished_ones_are_none(tmp_path):
    """A save that did not finish is nothing to warn of."""
    damaged = save(tmp_path, 1)
    (data,) = pathlib.Path(damaged).glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=r"step-00000001 is skipped: .*cut off"):
        assert elastic.latest(tmp_path) is None
    (damaged / ".metadata").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert elastic.latest(tmp_path) is None
