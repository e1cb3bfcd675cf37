"""Metadata of a cluster: 1,024 ranks and 100,000 chunks."""

import subprocess
import sys

import pytest

from tests.ckpt import large_metadata
from tests.support.peers.files import TOOL, need_tool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need_tool()
    path = tmp_path_factory.mktemp("large") / "run"
    assert large_metadata.write(path) >= 100_000
    return path


# In a program of its own, since the peak that the system tells begins with that of the program
# which started it.
MEASURE = """
import os, subprocess, sys
program = subprocess.Popen(sys.argv[1:])
_, status, used = os.wait4(program.pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def measured(*arguments):
    """What a command prints, seconds of a core, which other work on the machine does not change,
    and MiB at the peak.
    """
    command = [sys.executable, "-S", "-c", MEASURE, TOOL, *map(str, arguments)]
    *said, numbers = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    code, seconds, mib = map(float, numbers.split())
    assert code == 0
    return "\n".join(said), seconds, mib


def test_inspect_takes_less_than_two_seconds(folder):
    said, seconds, mib = measured("inspect", folder)
    assert "layers.48.weight" in said and seconds < 2 and mib < 256


@pytest.mark.parametrize("ranks", [512, 1000])
def test_a_plan_takes_less_than_ten_seconds(folder, ranks):
    said, seconds, mib = measured(
        "reshard", folder, folder.parent / "out", "--world-size", str(ranks), "--dry-run"
    )
    assert "would write" in said and seconds < 10 and mib < 256
