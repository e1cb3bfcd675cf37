"""The ways in which torch's own tests save and load, with Writer and Reader instead of the
file system's, on 2 and 4 ranks.
"""

import subprocess
import sys

import pytest

from tests.checkpoint.storage import storage_cases_worker as worker
from tests.support.paths import importing_tests

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", worker.CASES)
def test_torch_and_lowbit_read_what_either_wrote(pool, tmp_path, case, ranks):
    assert pool.run(ranks, worker.run, case, str(tmp_path / "run")) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_directory_that_ranks_wrote_each_for_itself(pool, tmp_path, ranks):
    told = pool.run(ranks, worker.alone, str(tmp_path / "run"))
    assert told == [[f"__{rank}.metadata" for rank in range(ranks)]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_are_written_once_and_spread_over_the_ranks(pool, tmp_path, ranks):
    sizes, *_ = pool.run(ranks, worker.dedup, str(tmp_path / "run"), False)
    assert len(sizes) == ranks and max(sizes) <= 1.1 * min(sizes)
    assert sum(sizes) < 1.1 * 8 * 256 * 128 * 4
    sizes, *_ = pool.run(ranks, worker.dedup, str(tmp_path / "lowest"), True)
    assert len(sizes) == 1


def test_a_process_that_torch_starts_saves(tmp_path):
    command = [sys.executable, worker.__file__, str(tmp_path / "store"), str(tmp_path / "run")]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=importing_tests(),
        )
        for rank in range(2)
    ]
    for out, err in [process.communicate() for process in started]:
        assert out == "equal\n", err
