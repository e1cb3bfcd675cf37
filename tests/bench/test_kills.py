"""bench.storage.kills: some of its kills; LOWBIT_KILLS says how many."""

import os
import subprocess
import sys


def test_killed_saves_leave_the_last_whole_checkpoint():
    count = os.environ.get("LOWBIT_KILLS", "3")
    ended = subprocess.run(
        [sys.executable, "-m", "bench.storage.kills", "--count", count, "--mib", "8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f'"kills": {count}' in ended.stdout and "whole" in ended.stdout
