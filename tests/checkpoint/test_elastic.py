"""A rank that is killed with SIGKILL while it steps, saves or loads: torchrun starts all of them
again, and the run ends where it would have ended.
"""

import datetime
import errno
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint, elastic
from lowbit.checkpoint import native
from tests.support.paths import ROOT, TESTS, importing_tests
from tests.support.ranks import launch
from tests.support.require import need

pytestmark = pytest.mark.long

need(
    "ckpt",
    native._checkpoint is not None,
    "lowbit was built without its checkpoint module",
    module=True,
)

TORCHRUN = TESTS / "support/ranks/torchrun.py"
STEPS = 14  # with a checkpoint every 4 steps, and the last


def run(folder, *, ranks=2, kill=None, restarts=3, forked=True):
    """The recipe under torchrun; what it printed. Limits of time are against waiting for ever:
    torch would wait for another rank for half an hour.

    Args:
        forked: torchrun and its ranks are forks of a process that has imported torch, which they do
            not do again; else they are what the command of the recipe's first lines starts.
    """
    script = ROOT / ("tests/checkpoint/killing.py" if kill else "recipes/elastic.py")
    command = [
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        str(restarts),
        "--monitor-interval",
        "0.2",
        str(script),
        "--folder",
        str(folder),
        "--steps",
        str(STEPS),
        "--every",
        "4",
        "--timeout",
        "180",
    ]
    said = {"OMP_NUM_THREADS": "1", "KILL": kill or "", "MARKER": f"{folder}.killed"}
    if forked:
        return launch.run(TORCHRUN, 0, *command, timeout=900, **said)
    started = [sys.executable, "-m", "torch.distributed.run", *command]
    done = subprocess.run(
        started, capture_output=True, text=True, env=importing_tests(**said), timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def digest(folder, step=STEPS):
    return checkpoint.inspect(elastic.step_folder(folder, step), digest=True)["digest"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("elastic") / "whole"
    run(folder)
    return folder


@pytest.mark.parametrize("kill", ["1:step:7", "1:save:2", "0:save:2"])
def test_a_killed_rank_is_started_again(whole, tmp_path, kill):
    """The same bits in the end. A save is the second, of step 8;
    what is left of it is not a checkpoint.
    """
    said = run(tmp_path / "run", kill=kill, forked=kill != "1:step:7")
    assert pathlib.Path(str(tmp_path / "run") + ".killed").exists(), "nobody was killed"
    assert re.search(r"resuming from .*step-00000004$", said, re.MULTILINE)
    assert digest(tmp_path / "run") == digest(whole)


def test_killed_while_it_loads(whole, tmp_path):
    shutil.copytree(elastic.step_folder(whole, 8), elastic.step_folder(tmp_path / "run", 8))
    assert "resuming from" in run(tmp_path / "run", kill="1:load:1")
    assert pathlib.Path(str(tmp_path / "run") + ".killed").exists(), "nobody was killed"
    assert digest(tmp_path / "run") == digest(whole)


def test_on_another_number_of_ranks(whole, tmp_path):
    """Two ranks, of which one dies for good in a save;
    three continue from the checkpoint before it.
    """
    folder = tmp_path / "run"
    with pytest.raises(AssertionError, match=r"\{'0': 1\}"):
        run(folder, kill="1:save:3", restarts=0)
    assert elastic.latest(folder) == elastic.step_folder(folder, 8)
    assert checkpoint.verify(elastic.step_folder(folder, 8))["ok"]
    assert digest(folder, 8) == digest(whole, 8)
    said = run(folder, ranks=3)
    assert "resuming from" in said
    assert elastic.latest(folder, values=True) == elastic.step_folder(folder, STEPS)


# Which checkpoint is the latest


def test_what_is_passed_over(whole, tmp_path):
    """Unfinished, cut short and damaged ones."""
    assert elastic.latest(tmp_path / "nothing") is None
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "step-00000099").mkdir()
    (folder / "notes").mkdir()
    (folder / "step-abc").mkdir()
    last, before = elastic.step_folder(folder, STEPS), elastic.step_folder(folder, 12)
    assert elastic.latest(folder) == last
    part = last / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    part.write_bytes(content)
    assert elastic.latest(folder) == last  # its structure is sound
    assert elastic.latest(folder, values=True) == before
    part.write_bytes(content[:-100])
    assert elastic.latest(folder) == before
    (before / ".metadata").unlink()
    assert elastic.latest(folder) == elastic.step_folder(folder, 8)


def test_a_checkpoint_with_an_opaque_value_is_sound(tmp_path):
    """Such as a date, which torch pickles: loads read the rest."""
    path = elastic.step_folder(tmp_path, 1)
    dcp.save({"w": torch.ones(2), "at": datetime.date(2026, 1, 1)}, checkpoint_id=path)
    assert elastic.latest(tmp_path) == elastic.latest(tmp_path, values=True) == path


def test_a_folder_that_cannot_be_listed_or_read_is_an_error(whole, tmp_path, monkeypatch):
    """Finding none would restart the run, and an older step would differ from other ranks'."""
    with pytest.raises(ValueError, match=r"s3://bucket/run.*local folders"):
        elastic.latest("s3://bucket/run")
    with pytest.raises(ValueError, match=r"memory://run.*local folders"):
        elastic.step_folder("memory://run", 4)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        elastic.latest(tmp_path / "file")

    def no_more_files(path):
        raise checkpoint.CheckpointError(f"{path}: Too many open files", 1)

    monkeypatch.setattr(checkpoint, "inspect", no_more_files)
    with pytest.raises(checkpoint.CheckpointError, match="Too many open files"):
        elastic.latest(whole)


@pytest.mark.parametrize("call", ["exists", "iterdir"])
def test_a_folder_that_the_system_does_not_list_is_an_error(tmp_path, monkeypatch, call):
    """Path.exists swallows every OSError from Python 3.14 on."""

    def broken(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(pathlib.Path, "iterdir", broken)
    if call == "exists":
        monkeypatch.setattr(pathlib.Path, "exists", lambda path: False)
    with pytest.raises(checkpoint.CheckpointError, match="Input/output error") as raised:
        elastic.latest(tmp_path)
    assert raised.value.code == 1 and str(tmp_path) in str(raised.value)


def test_folders_of_steps():
    assert elastic.step_folder("out", 12).name == "step-00000012"
    with pytest.raises(ValueError, match="-1"):
        elastic.step_folder("out", -1)
