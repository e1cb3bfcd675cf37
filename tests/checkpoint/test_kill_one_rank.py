"""One rank of a save is killed, and the others live: they are told at once, and what was there is there."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import storage_worker
from storage_files import holds, save

WORKER = pathlib.Path(storage_worker.__file__)


@pytest.mark.parametrize(("way", "ranks", "who"), [("save", 2, 0), ("save", 2, 1), ("save", 4, 2), ("async_save", 2, 0), ("async_save", 2, 1)])  # fmt: skip
def test_the_others_raise_and_the_last_checkpoint_is_whole(tmp_path, way, ranks, who):
    path = tmp_path / "run"
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "one_dies", str(tmp_path / "store"), str(path), str(rank), str(ranks), str(who), way],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    ended = [process.communicate(timeout=600) for process in started]
    assert started[who].returncode == -signal.SIGKILL
    for rank, (out, err) in enumerate(ended):
        if rank != who:
            error, seconds = json.loads(out) if out else ("", 0)
            assert error and seconds < 60, (rank, error, seconds, err[-2000:])
    assert holds(path, 0)
    left = {name for name in os.listdir(tmp_path) if "partial" in name}
    assert left <= {".run.partial-saving"}
    save(storage_worker.state(0, 2), path)  # which removes it
    assert holds(path, 2) and not [name for name in os.listdir(tmp_path) if "partial" in name]
