"""Every recipe runs on the CPU as its first lines say, learns, and goes on from what it saved."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from paths import RECIPES
from require import need

COVERED = {
    "demo",
    "elastic",
    "toy",
    "train_gpt",
}  # make run, test_elastic, the helper, and the regression tests


def run(name, ranks, folder):
    """The recipe on so many ranks (0: without torchrun); returns the losses that it printed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launch if ranks else []), str(RECIPES / f"{name}.py")]
    root = str(RECIPES.parent)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [float(x) for x in re.findall(r"loss'?:? '?(\d+\.\d+)", done.stdout)]


@pytest.mark.parametrize(
    "name, ranks, again",
    [
        ("single_device", 0, 0),
        ("step_in_backward", 0, None),
        ("fsdp2", 2, 1),
        ("fsdp1", 2, 1),
        ("ddp_accumulate", 2, None),
        ("hsdp_tp", 4, None),
        ("huggingface", 0, None),
        ("from_bitsandbytes", 0, None),
        ("float32_to_8bit", 0, None),
    ],
)
def test_recipe(name, ranks, again, tmp_path):
    if name == "huggingface":
        present = importlib.util.find_spec("transformers") is not None
        need("frameworks", present, "transformers is not installed: pip install lowbit[frameworks]")
    first = run(name, ranks, tmp_path)
    assert len(first) >= 2 and first[-1] < first[0] - 0.1, first
    if again is not None:
        second = run(name, again, tmp_path)
        assert second[0] < first[0] - 1.0 and second[-1] < first[-1], (first, second)


def test_every_recipe_is_run():
    names = {path.stem for path in RECIPES.glob("*.py")}
    text = pathlib.Path(__file__).read_text()
    assert {name for name in names if f'("{name}",' not in text} == COVERED
