"""One rank of a save is killed, and the others live: they are told at once,
and what was there is there.
"""

import json
import os
import signal

import pytest

from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import holds, save
from tests.support.ranks import forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "ranks", "who"),
    [("save", 2, 0), ("save", 2, 1), ("save", 4, 2), ("async_save", 2, 0), ("async_save", 2, 1)],
)
def test_the_others_raise_and_the_last_checkpoint_is_whole(tmp_path, way, ranks, who):
    path = tmp_path / "run"
    started = [
        forked.start(storage_worker.one_dies, tmp_path / "store", path, rank, ranks, who, way)
        for rank in range(ranks)
    ]
    for rank, (process, printed) in enumerate(started):
        process.join(timeout=600)
        if rank != who:
            out = printed.read() if process.exitcode == 0 else ""
            error, seconds = json.loads(out) if out else ("", 0)
            assert error and seconds < 60, (rank, error, seconds, process.exitcode)
    assert started[who][0].exitcode == -signal.SIGKILL
    assert holds(path, 0)
    left = {name for name in os.listdir(tmp_path) if "partial" in name}
    assert left <= {".run.partial-saving"}
    save(storage_worker.state(0, 2), path)  # which removes it
    assert holds(path, 2) and not [name for name in os.listdir(tmp_path) if "partial" in name]
