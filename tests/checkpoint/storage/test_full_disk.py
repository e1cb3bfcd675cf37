"""A disk that is full for one rank: an error on all, and no checkpoint or the old one."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.checkpoint.storage import full_disk_worker as worker
from tests.support.files.systems import mounted
from tests.support.paths import importing_tests
from tests.support.shim import preloaded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two ranks say of each case: the error, whether the name is there, whether it holds the
    old values, and how the next save ends.
    """
    folder = tmp_path_factory.mktemp("full")
    shim = preloaded(folder, worker.SHIM)
    started = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(folder / "store"), str(folder), str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=importing_tests(**shim),
        )
        for rank in range(2)
    ]
    ended = [process.communicate() for process in started]
    assert all(out for out, _ in ended), ended[0][1] + ended[1][1]
    return folder, [json.loads(out) for out, _ in ended]


@pytest.mark.parametrize("number", range(len(worker.CASES)), ids=map(str, worker.CASES))
def test_all_ranks_are_told_and_nothing_is_published(told, number):
    folder, ranks = told
    case = worker.CASES[number]
    _, who, over, _ = case
    for text, there, holds_the_old, next_save in (said[number] for said in ranks):
        assert "CheckpointException" in text and "the disk is full while" in text
        assert f"(RANK {who})" in text and worker.path_of(folder, case) in text
        assert there == over and holds_the_old == over and next_save == "no error"


def test_a_file_system_that_is_really_full(tmp_path):
    """Of 4 MiB, in memory, and rank 1 has 16 MiB to save."""
    program = pathlib.Path(__file__).with_name("real_full_disk_worker.py")
    with mounted(tmp_path / "disk", "tmpfs", "4m") as disk:
        started = [
            subprocess.Popen(
                [*disk.enter, sys.executable, program, tmp_path / "disk", str(rank), "2"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        ended = [process.communicate(timeout=600) for process in started]
    for text, error in ended:
        assert text, error
        first, second, used, old, left, third, new = json.loads(text)
        assert (first, third) == ("no error", "no error")
        assert "CheckpointException" in second and "the disk is full while" in second
        assert "(RANK 1)" in second and "__1_0.distcp" in second
        assert used < 1 << 20, "rank 1 has given back what it could write"
        assert (old, new) == (1, 3)
        assert left == ["run"]
