"""Another thread's interpreter runs while Writer's file is written and Reader's tensors are read,
as training does.
"""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from lowbit.checkpoint.native import native
from tests.checkpoint.gil import STEPS, steps_during


def test_a_write_releases_the_gil(tmp_path):
    t = torch.ones(4 << 20)
    file = native().RankFile(os.fsencode(tmp_path), b"__0_0.distcp", False)
    item = ("w", "float32", tuple(t.shape), t.data_ptr())
    assert steps_during(lambda _: file.write([item], 1, None), 60) >= STEPS


@pytest.mark.parametrize("verify", [True, False])
def test_a_read_releases_the_gil(tmp_path, verify):
    t = torch.ones(4 << 20)
    dcp.save(
        {"w": t}, storage_writer=checkpoint.Writer(tmp_path / "run", sync_files=False), no_dist=True
    )
    reader = checkpoint.Reader(tmp_path / "run")
    reader.read_metadata()
    wanted = [("w", [0], list(t.shape), t.data_ptr(), t.nbytes)]
    assert steps_during(lambda _: reader._reader.read_into(wanted, 1, verify, None), 200) >= STEPS


def test_work_that_keeps_the_gil_is_seen():
    """The measure itself: one long call of C that lets nobody else run."""
    assert steps_during(lambda _: sum(range(2_000_000)), 20) < STEPS
