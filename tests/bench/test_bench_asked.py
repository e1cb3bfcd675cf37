"""What `make gpu` is asked to show, from made-up results;
and the wheels of baselines that it installs for its bench.
"""

import importlib.machinery
import importlib.util
import itertools
import os
import subprocess
import sys
import zipfile
from unittest import mock

import pytest

from bench.contestants import baselines, ours
from bench.contestants.contestant import tensors
from bench.gpu import __main__ as gpu
from bench.gpu import asked, large, tile_model
from bench.gpu import stages as gpu_stages
from bench.gpu.stage import Stage, junit
from bench.measuring.workload import MANY, QUARTER
from tests.support.paths import ROOT

OURS = [name for name in large.RUNS if name.startswith("lowbit")]
NAMES = (*asked.BASELINES, asked.EIGHT, asked.IN_GRAPH)


def row(name, seconds, share=0.5):
    return {"name": name, "seconds": seconds, "of_copy_speed": share, "gb_per_second": 4000 * share}


def case(workload, rows, cut="", missing=None):
    return {"workload": workload.name, "cut": cut, "rows": rows, "missing": missing or {}}


def stage(name, status="passed", **more):
    return {"name": name, "status": status, "tail": "", "seconds": 1.0, **more}


def good():
    """A report in which everything is met."""
    rows = [
        row(asked.EIGHT, [1.0, 2.0, None], 0.9),
        row(asked.IN_GRAPH, [0.9, 1.0, 1.0], 0.95),
        *(row(name, [3.0, 4.0, 5.0]) for name in asked.BASELINES),
    ]
    return {
        "seconds": 500.0,
        "stages": [
            stage("build"),
            stage(
                "cuda-tests",
                tests={"passed": 300, "failures": 0, "errors": 0, "skipped": 2},
                graphs={"passed": 9, "failed": 0},
            ),
            stage("bench-step", result={"step": [case(QUARTER, rows), case(MANY, rows)]}),
            stage(
                "memcheck",
                summary="ERROR SUMMARY: 0 errors",
                errors=[],
                tests={"passed": 20, "failed": 0},
            ),
            stage(
                "racecheck",
                summary="RACECHECK SUMMARY: 0 hazards",
                errors=[],
                tests={"passed": 20, "failed": 0},
            ),
            stage("large", large={name: {"peak": 20 << 30, "ratio": 0.97} for name in OURS}),
        ],
    }


def of(report, name):
    return next(s for s in report["stages"] if s["name"] == name)


def said(report):
    """By the beginning of what was asked."""
    return {x["asked"]: x for x in asked.lines(report)}


def test_names_are_those_of_the_contestants():
    assert (ours.Eight.name, ours.EightInGraph.name) == (asked.EIGHT, asked.IN_GRAPH)
    kinds = (baselines.Torch, baselines.Torchao, baselines.Bitsandbytes, baselines.FlashOptim)
    assert tuple(kind.name for kind in kinds) == asked.BASELINES


COUNTS = """
sm_90: a tile of 256 values, in clocks of a multiprocessor; what memory needs is by card
instructions  alu fp32 imad  xu memory control uniform issue clk alu clk wavefronts \
 bytes    H200 clk     H100 clk  kernel
         619  190  160   95  17     60      45      17       155      95        135 \
  2580         139          198  step_fast<AdamRule<false, false>, \
BFloat16Stochastic, BFloat16Grad, Dynamic8, Dynamic8Unsigned>
         540  168  150   90  17     55      43      17       135      84        121 \
  2580         139          198  step_fast<AdamRule<true, false>, \
BFloat16Stochastic, BFloat16Grad, Dynamic8, Dynamic8Unsigned>
         728  296  150   90  17     55      43      17       182     148        141 \
  3604         194          277  step_fast<AdamRule<true, false>, \
BFloat16Kahan, BFloat16Grad, Dynamic8, Dynamic8Unsigned>

sm_90: 3 kernels
"""


def test_a_tile_counted_and_measured(tmp_path):
    """1,000 tiles on each of 100 multiprocessors in 0.2 ms of 2 GHz: 400 clocks a tile."""
    (tmp_path / "kernels.txt").write_text(COUNTS)
    counts = tile_model.counted(tmp_path / "kernels.txt")
    assert [c["issue clk"] for c in counts.values()] == [155.0, 135.0, 182.0]
    rows = [
        row(asked.EIGHT, [2e-4, None, 1e-4, 3e-4]),
        row(ours.Kahan.name, [4e-4]),
        row("torch", [1.0]),
        {**row(tile_model.COPY, [1.0]), "gb_per_second": 1290.0},
    ]
    timed = {**case(QUARTER, rows), "numel": 100 * 1000 * 256, "clocks": {"clocks.sm": "2000"}}
    report = {
        "machine": {"gpu": {"multiprocessors": "100"}},
        "stages": [stage("build", tiles=counts), stage("bench-step", result={"step": [timed]})],
    }
    text = tile_model.page(report)
    assert f"| {asked.EIGHT} | 135 | 84 | 121 | 400 | 400 | 1.00 |" in text
    assert (
        f"| {ours.Kahan.name} | 182 | 148 | 141 | 559 | 800 | 1.43 |" in text
        and "torch" not in text
    )
    timed["clocks"] = {}
    assert tile_model.page(report) == "Not measured: no clock is known."
    assert "the build counted no tiles" in tile_model.page({**report, "stages": []})
    names = {getattr(kind, "name", "") for kind in vars(ours).values()}
    assert set(tile_model.KERNELS) <= names and baselines.Copy.name == tile_model.COPY
    limits = (ROOT / "csrc" / "cuda" / "tile_limits.txt").read_text()
    assert all(f"step_fast<{kernel}>" in limits for kernel in tile_model.KERNELS.values())


def test_everything_is_met():
    found = asked.lines(good())
    assert [x["met"] for x in found] == [True] * 15, found
    text = asked.page(found)
    assert (
        text.count("| yes |") == 15 and f"85% or more of the copy's speed, {QUARTER.name}" in text
    )
    assert "90.0%: 3,600 GB/s" in text and "300 passed, 0 failed, 2 skipped" in text
    # Median of 1/3, 2/4.
    assert f"its time is 1, ours: {QUARTER.name} 0.42, {MANY.name} 0.42" in text


def test_nothing_was_reached():
    found = asked.lines({"seconds": 700.0, "stages": [stage("build", "failed")]})
    assert [x["met"] for x in found] == [None] * 14 + [False]
    assert all(x["measured"] for x in found)
    assert "| open |" in asked.page(found) and "| **no** |" in asked.page(found)


@pytest.mark.parametrize("cut, met", [("", False), ("half of it here", False)])
def test_a_slow_step(cut, met):
    report = good()
    for c in of(report, "bench-step")["result"]["step"]:
        c["rows"], c["cut"] = [row(asked.EIGHT, [6.0, 6.0, 6.0], 0.799), *c["rows"][1:]], cut
    found = said(report)
    slow = [x for name, x in found.items() if x["met"] is met]
    assert len(slow) == 2 + len(asked.BASELINES), slow  # both shares, and every race


def test_a_smaller_tensor_than_asked_shows_nothing():
    report = good()
    of(report, "bench-step")["result"]["step"][0]["cut"] = "1 of 536,870,912 elements here"
    found = said(report)
    line = next(x for name, x in found.items() if QUARTER.name in name)
    assert line["met"] is None and "elements here" in line["measured"]


def test_a_peer_that_was_not_there():
    report = good()
    for c in of(report, "bench-step")["result"]["step"]:
        c["rows"] = [r for r in c["rows"] if r["name"] != baselines.Torchao.name]
        c["missing"] = {baselines.Torchao.name: "the package torchao is not installed"}
    line = said(report)[f"8-bit step faster than {baselines.Torchao.name}"]
    assert line == {
        "asked": line["asked"],
        "measured": "not measured: the package torchao is not installed",
        "met": None,
    }


def test_a_peer_that_is_faster_somewhere():
    report = good()
    of(report, "bench-step")["result"]["step"][1]["rows"][2]["seconds"] = [0.5, 0.5, 0.5]
    assert said(report)[f"8-bit step faster than {asked.BASELINES[0]}"]["met"] is False


@pytest.mark.parametrize(
    "name, tests",
    [
        ("cuda-tests", "the CUDA test suite is green"),
        ("memcheck", "compute-sanitizer's memcheck is clean over the small tests"),
    ],
)
def test_stages_that_did_not_pass(name, tests):
    report = good()
    of(report, name)["status"] = "timed out"
    assert said(report)[tests]["met"] is None  # nothing wrong yet is not all right
    assert "timed out" in said(report)[tests]["measured"]
    of(report, name)["status"] = "failed"
    assert said(report)[tests]["met"] is False
    report["stages"] = [
        s if s["name"] != name else stage(name, "missing", tail="it was not found")
        for s in report["stages"]
    ]
    assert (
        said(report)[tests]["met"] is None and said(report)[tests]["measured"] == "it was not found"
    )


def test_a_hazard():
    report = good()
    of(report, "racecheck").update(status="failed", errors=["Race reported"], summary="1 hazard")
    assert (
        said(report)["compute-sanitizer's racecheck is clean over the small tests"]["met"] is False
    )


def test_a_large_model_that_does_not_fit_and_one_that_needs_more_than_estimated():
    report = good()
    of(report, "large")["large"] |= {
        OURS[1]: {"error": "OutOfMemoryError: CUDA out of memory"},
        OURS[2]: {"peak": 22 << 30, "ratio": 1.06},
    }
    found = said(report)
    fits, near = (
        found["8 B parameters inside 24 GiB"],
        found["its peak within 5 % of lowbit.estimate"],
    )
    assert fits["met"] is False and "OutOfMemoryError" in fits["measured"]
    assert near["met"] is False and near["measured"] == "0.970, 1.060"


def test_runs_of_a_large_model_that_were_not_reached_prove_nothing():
    report = good()
    del of(report, "large")["large"][OURS[2]]
    found = said(report)
    for asked_of in ("8 B parameters inside 24 GiB", "its peak within 5 % of lowbit.estimate"):
        assert found[asked_of]["met"] is None and found[asked_of]["measured"]


def test_a_run_of_a_large_model_that_fails_is_a_line_of_the_table(tmp_path):
    """The others are worth knowing."""
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "one_card.py"
    recipe.write_text("print('{}')\nraise MemoryError('of | a card')\n")
    with mock.patch.object(large, "ROOT", tmp_path):
        found = large.run(tmp_path / "none.json", [], "cpu", True)
    assert found == {"error": "MemoryError: of | a card"}
    assert large.row("nobody's", found) == ["nobody's", "MemoryError: of / a card", "", ""]
    done = subprocess.CompletedProcess([], 0, "a line\n", "")
    with mock.patch.object(large.subprocess, "run", lambda *a, **k: done):
        found = large.run(tmp_path / "none.json", [], "cpu", True)
    assert found == {"error": "it printed no result"}
    whole = {"tokens_per_second": 1234.5, "peak": 3 << 30, "ratio": 1.01}
    assert large.row("lowbit", whole) == ["lowbit", "1,234", "3.00", "1.010"]


def test_graphs_that_differ():
    report = good()
    of(report, "cuda-tests").update(status="failed", graphs={"passed": 8, "failed": 1})
    assert said(report)["graph-captured steps equal eager ones"]["met"] is False
    of(report, "cuda-tests").update(graphs={"passed": 0, "failed": 0})
    assert said(report)["graph-captured steps equal eager ones"]["met"] is None


def test_graphs_are_counted_by_their_names(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_graph_a(): pass\n@pytest.mark.parametrize('x', [0, 1])\n"
        "def test_in_a_graph(x): assert x\ndef test_other(): pass\n"
        "@pytest.mark.skip\ndef test_graph_b(): pass\n"
    )
    report = tmp_path / "x.xml"
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-vv",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "test_x.py",
    ]
    text = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path).stdout
    for found in (junit(report)(""), junit(tmp_path / "none.xml")(text)):
        assert found["graphs"] == {"passed": 2, "failed": 1}, text


def wheel(folder, name, version):
    """A package of one line, as pip takes it."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", "here = True\n")
        file.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            "Requires-Dist: no-such-package\n",
        )
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{info}/RECORD", "")


def test_baselines_come_from_wheels(tmp_path):
    """Without a network and without what they ask for,
    in a folder that only stages with baselines look into.
    """
    folder, wheels = tmp_path / "out", tmp_path / "wheels"
    folder.mkdir(), wheels.mkdir()
    wheel(wheels, "a_peer", "1.2.3")
    made = gpu.stages(folder, [], "9.0", gpu.Choice(wheels=wheels))
    assert [s.name for s in made[:3]] == ["build", "baselines", "cuda-tests"]
    done = made[1].run(tmp_path, 100, set())
    assert done["status"] == "passed", done["tail"]
    assert done["baselines"] == {"a_peer": "1.2.3"}
    assert "a_peer 1.2.3" in gpu.baselines_line([done])
    for s in made:
        finds = "PYTHONPATH" in s.env
        assert finds == (s.name in ("bench-step", "bus", "large")), s.name
        if finds:
            env = {**os.environ, **s.env}
            subprocess.run([sys.executable, "-c", "import a_peer"], env=env, check=True)
    # What an earlier call left is removed.
    assert (
        gpu.stages(folder, [], "9.0", gpu.Choice(wheels=wheels))
        and not (folder / "baselines").exists()
    )


def test_wheels_that_cannot_be_installed(tmp_path):
    """It is said on the page, and the bench runs."""
    (tmp_path / "broken-1-py3-none-any.whl").write_text("no zip")
    installs, env = gpu_stages.baselines(tmp_path, tmp_path)
    done = installs[0].run(tmp_path, 100, set())
    assert done["status"] == "failed" and done["baselines"] == {} and env
    assert all(
        s.after != "baselines" for s in gpu.stages(tmp_path, [], "9.0", gpu.Choice(wheels=tmp_path))
    )
    empty, _ = gpu_stages.baselines(tmp_path, tmp_path / "nothing")
    assert "there are no wheels in" in empty[0].run(tmp_path, 100, set())["tail"]
    assert "No wheels of baselines were given" in gpu.baselines_line([])


def test_make_gpu_hands_the_folder_on():
    for given, there in (([], False), (["WHEELS=a folder"], True)):
        done = subprocess.run(
            ["make", "-n", "gpu", *given], capture_output=True, text=True, cwd=ROOT
        )
        assert ('--wheels "a folder"' in done.stdout) == there, done.stdout + done.stderr


def test_stages_name_files_and_modules_that_exist(tmp_path, monkeypatch):
    """With every tool of a card's machine, which finds out only there."""
    monkeypatch.setattr(gpu_stages, "found_tool", lambda name, first="": sys.executable)
    sources = set()
    for stage in gpu.stages(tmp_path, [], "9.0"):
        assert not isinstance(stage.command, str), stage
        words = " ".join(stage.command).split()
        for before, word in itertools.pairwise(words):
            if before == "-m":
                # util.find_spec("pip") would have setuptools leave distutils alone in this process,
                # and import of setuptools (torch.utils.cpp_extension) fail from then on.
                found = importlib.machinery.PathFinder.find_spec(word.partition(".")[0])
                assert found is not None, (stage.name, word)
                if word != "pip":
                    assert importlib.util.find_spec(word) is not None, (stage.name, word)
            elif word.startswith(("tests/", f"{ROOT}/")):
                assert (ROOT / word).exists(), (stage.name, word)
                sources.add((ROOT / word).name)
    assert {"patterns.cu", "test_cuda.py"} <= sources


@pytest.mark.parametrize("capability, runs", [("8.0", False), ("9.0", True), ("12.0", True)])
def test_patterns_need_bulk_copies(tmp_path, monkeypatch, capability, runs):
    """On an older card they do not compile, and that says nothing of the card."""
    monkeypatch.setattr(gpu_stages, "found_tool", lambda name, first="": "/bin/false")
    [stage] = (s for s in gpu.stages(tmp_path, [], capability) if s.name == "patterns")
    assert isinstance(stage.command, list) == runs
    assert runs or "9.0" in stage.command


@pytest.fixture
def described(monkeypatch):
    """A machine with a GPU, and all the time."""
    monkeypatch.setattr(gpu, "BEGAN", gpu.time.perf_counter())
    monkeypatch.setattr(
        gpu,
        "describe",
        lambda: {
            "date": "2026-11-21T10:00+00:00",
            "gpu": {},
            "python": "3.12",
            "torch": "2.11.0",
            "cuda": "13.0",
            "commit": "a",
            "cores": 16,
            "nvcc": "13.0",
        },
    )


def test_a_result_of_an_unexpected_form_stops_no_later_stage(
    tmp_path, monkeypatch, capsys, described
):
    odd = {"tests": {"passed": 1}, "result": {"step": [{"rows": "none"}]}}
    made = [
        Stage("cuda-tests", 30, [sys.executable, "-c", ""], read=lambda text: odd),
        Stage("bench-step", 30, [sys.executable, "-c", ""], read=lambda text: odd),
        Stage("later", 30, [sys.executable, "-c", ""]),
    ]
    monkeypatch.setattr(gpu, "stages", lambda *_: made)
    assert gpu.run([], tmp_path) == 0
    printed = capsys.readouterr()
    assert "later: passed" in printed.out and "VERDICT: none, " in printed.out
    assert "the goals could not be evaluated" in printed.err


def test_stages_beside_each_other(tmp_path, monkeypatch, described):
    """Two that wait for each other's file end only if both run."""
    wait = (
        "import pathlib, time; pathlib.Path({0!r}).touch(); t = time.time()\n"
        "while not pathlib.Path({1!r}).exists() and time.time() - t < 20: time.sleep(0.01)\n"
        "assert pathlib.Path({1!r}).exists()"
    )
    files = [str(tmp_path / name) for name in "ab"]
    made = [
        Stage("a", 30, [sys.executable, "-c", wait.format(*files)]),
        Stage("b", 30, [sys.executable, "-c", wait.format(*files[::-1])], parallel=True),
        Stage("c", 30, "missing"),
    ]
    assert [[s.name for s in group] for group in gpu.together(made)] == [["a", "b"], ["c"]]
    monkeypatch.setattr(gpu, "stages", lambda *_: made)
    assert gpu.run([], tmp_path) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "Not passed: c" in text and "## Asked, measured, met" in text and "| open |" in text


class Quantized:
    """As FlashOptim keeps a moment: no tensor, but something that holds some."""

    def __init__(self, quantized, scales, data):
        self.quantized, self.scales, self.data = quantized, scales, data

    def is_quantized(self):
        return self.data is None


def test_state_that_is_no_tensor_is_weighed():
    import torch

    state = {
        "exp_avg": Quantized(
            torch.zeros(64, dtype=torch.int8), torch.zeros(2, dtype=torch.float16), None
        ),
        "exp_avg_sq": Quantized(None, None, torch.zeros(64)),
        "error_bits": torch.zeros(64, dtype=torch.int8),
        "step": torch.tensor(1),
    }
    found = {name: t.numel() * t.element_size() for name, t in tensors(state) if t.ndim}
    assert found == {"exp_avg.codes": 64, "exp_avg.scale": 4, "exp_avg_sq": 256, "error_bits": 64}
