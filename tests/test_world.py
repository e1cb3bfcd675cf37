"""Every rule, state format, scale and parameter format leaves the same bytes on 1, 2, 3 and 4 ranks, by rows, by columns and replicated, in real
processes over gloo; sums and maxima over the tensor included."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).parent / "world_worker.py"


def launch(folder, ranks):
    out = folder / f"{ranks}.json"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(start if ranks > 1 else []), str(WORKER), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, f"{ranks} ranks:\n{done.stderr[-4000:]}"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_leaves_the_same_bytes(alone, tmp_path, ranks):
    got = launch(tmp_path, ranks)
    wrong = [name for name, digest in got.items() if digest != alone[name.partition(",")[0]]]
    assert not wrong, f"{len(wrong)} of {len(got)} differ on {ranks} ranks: {wrong[:10]}"
    assert len(got) > 30
    print(f"{ranks} ranks: {len(got)} digests of weights and state equal those of one process")
