"""`make gpu` without a GPU: the same stages on the CPU, so that what this finds costs no card."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import stages as gpu_stages

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    """A copy of what a rehearsal reads, to plant mistakes in."""
    for name in ("tests", "bench", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__", "golden")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "tree")
    return tmp_path / "tree"


def rehearse(tree, *parts):
    """The exit status, statuses by stage, the page and what was printed."""
    out = tree.parent / "out"
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--out", str(out)]
    command += ["--minutes", "60", "--parts", *parts]
    # DeepSpeed's kernel takes part where it was built, and another process may be building it.
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tree.parent / "extensions")}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    report = json.loads((out / "gpu.json").read_text())
    statuses = {s["name"]: s["status"] for s in report["stages"]}
    return done.returncode, statuses, (out / "gpu.md").read_text(), done.stdout + done.stderr


def test_every_part(tree):
    code, statuses, page, said = rehearse(tree, *gpu.PARTS)
    assert code == 0 and set(statuses.values()) == {"passed"}, said
    assert set(statuses) == {
        "build",
        *["cuda-tests", "bench-step", "kernels", "muon", "profile", "bus", "train", "large"],
        *(["patterns"] if gpu_stages.nvcc() else []),
    }
    assert "VERDICT: " in said and " have the CPU's bits; AdamW with 8-bit state" in said
    titles = (
        "Stages",
        "One step over 2,000 tensors",
        "Muon",
        "The bus",
        "Training",
        "A small model",
    )
    assert [title for title in titles if f"## {title}" not in page] == []
    assert "could not be" not in page + said


def plant(path, here, there):
    text = path.read_text()
    assert here in text
    path.write_text(text.replace(here, there))


def test_a_module_that_hides_one_of_the_standard_library(tree):
    """It cost a whole run on a card once: torch imports `profile` by way of cProfile."""
    (tree / "profile.py").write_text("raise ImportError('this is not the profiler')\n")
    copied = '"pyproject.toml")'
    plant(tree / "bench" / "gpu" / "stages.py", copied, f'"profile.py", {copied}')
    code, statuses, page, _ = rehearse(tree, "train")
    assert code == 1 and statuses["train"] == "failed" and "this is not the profiler" in page


def test_a_wrong_keyword_in_a_test_of_kernels_and_in_training(tree):
    """Neither stage hides the other, nor stops it."""
    plant(
        tree / "tests" / "cuda" / "test_cuda.py", "coded(), **where)", "coded(), rows=1, **where)"
    )
    given = 'state_format="4bit"'
    plant(tree / "bench" / "speed" / "training.py", given, given.replace("format", "fromat"))
    code, statuses, page, _ = rehearse(tree, "bits", "train")
    assert code == 1 and statuses["cuda-tests"] == "failed" and "unexpected keyword" in page
    assert statuses["train"] == "failed" and "state_fromat" in page


def test_a_wheel_is_installed_apart_and_the_sources_are_not_seen(tmp_path):
    choice = gpu.Choice(("bits", "speed"), wheel=tmp_path / "lowbit.whl")
    build, tests, *others = gpu.stages(tmp_path, [], "9.0", choice)
    assert str(choice.wheel) in build.command and "-e" not in build.command
    for stage in (tests, *others):
        assert stage.cwd == tmp_path / "tree" and stage.env["PYTHONPATH"] == str(tmp_path / "site")
        assert (stage.cwd / "tests").is_dir() and not (stage.cwd / "lowbit").exists()
    assert [s.name for s in others] == ["bench-step", "kernels"]


def test_a_stage_that_cannot_end_in_time_does_not_begin(tmp_path):
    (stage,) = gpu.stages(tmp_path, [], "9.0", gpu.Choice(("train",)))[1:]
    said = stage.run(tmp_path, stage.took / 3, {"build"})
    assert said["status"] == "left out" and "on the last card" in said["tail"]
