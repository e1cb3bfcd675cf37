"""The bench: that its sums are right, that its pages can be written, and that `make gpu` fails
clearly without a GPU. No timing is tested.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from bench import __main__ as command
from bench.contestants import roster
from bench.contestants.baselines import Copy, Torch, TorchBfloat16
from bench.contestants.contestant import Contestant
from bench.contestants.ours import Eight, EightAvx2, Four, Kahan
from bench.gpu import __main__ as gpu
from bench.gpu import stages as gpu_stages
from bench.gpu.stage import Stage, junit, sanitizer
from bench.measuring import clock, machine, settings, workload
from bench.pages import page
from bench.speed import growth, step
from tests.support.paths import ROOT

pytestmark = pytest.mark.long

NVIDIA_SMI = (
    "NVIDIA H200, 580.159.04, 143771, 9.0, P0, 1980, 3201, 1980, 3201, 41, [N/A], 700.00, Enabled, "
    "0x0000000000000004\n"
)


@pytest.mark.parametrize(
    "model, parameters",
    [
        (workload.GPT2, 124_439_808),
        (workload.LLAMA_1B, 1_235_814_400),
        (workload.LLAMA_8B, 218_112_000),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_models_have_their_published_numbers_of_parameters(model, parameters):
    shapes, cut = model.shapes(1 << 40)
    assert (workload.numel(shapes), cut) == (parameters, "")


@pytest.mark.parametrize("limit", [1 << 12, 1 << 18, 1 << 24, 1 << 27])
@pytest.mark.parametrize("entry", [*workload.WORKLOADS, workload.QUARTER], ids=lambda w: w.name)
def test_workloads_keep_to_the_limit_and_say_what_they_left_out(entry, limit):
    shapes, cut = entry.shapes(limit)
    assert 0 < workload.numel(shapes) <= limit
    assert bool(cut) == (shapes != entry.shapes(1 << 40)[0])


@pytest.mark.parametrize(
    "kind, state, traffic",
    [
        (Torch, 8, 28),
        (TorchBfloat16, 4, 14),
        (Eight, 2.03125, 10.0625),
        (Four, 1.0625, 8.125),
        (Kahan, 4.03125, 14.0625),
    ],
)
def test_bytes_of_state_and_traffic(kind, state, traffic):
    entry = kind()
    entry.prepare(step.Params([(256, 256)], "cpu").of(entry.dtype))
    assert entry.state_bytes() / 65536 == state and entry.traffic() / 65536 == traffic


def test_the_copy_moves_what_an_8_bit_step_moves():
    params = step.Params([(256, 256)], "cpu").of(torch.bfloat16)
    eight, copy = Eight(), Copy()
    for entry in (eight, copy):
        entry.prepare(params)
    assert copy.traffic() == eight.traffic()


def test_a_forced_instruction_set_is_taken_back():
    import lowbit

    before, entry = lowbit.catalog()["isa"], EightAvx2()
    if entry.missing("cpu"):
        pytest.skip(entry.missing("cpu"))
    with entry.running():
        assert lowbit.catalog()["isa"] == "avx2"
    assert lowbit.catalog()["isa"] == before


def test_rounds_begin_with_another_each_time_and_the_slow_sit_out(monkeypatch):
    order, now = [], [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def turn(name, seconds):
        def take():
            order.append(name)
            now[0] += seconds
            return seconds

        return name, take

    turns = [turn("a", 0.001), turn("b", 2.0), turn("c", 2.0)]
    times = clock.rounds(turns, 4, 3.0, always=("c",))
    assert order[:6] == ["a", "b", "c", "b", "c", "a"]
    assert times["b"][2:] == [None, None] and None not in times["c"] + times["a"]
    assert clock.ratio([2.0, None, 6.0], [1.0, 1.0, 2.0]) == 2.5


def test_what_a_tensor_costs():
    """Tiny tensors have low-bit state, so that what they cost is what those of a model cost."""
    small = growth.SmallEight()
    p = torch.nn.Parameter(torch.zeros(growth.ROWS, growth.COLS, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    small.prepare([p])
    assert small.state_bytes() < 3 * growth.ROWS * growth.COLS
    found = growth.each_tensor(settings.TINY)
    assert (
        all(each["again"] > 0 and each["cold"] > 0 for each in found.values()) and len(found) == 4
    )


def test_what_nvidia_smi_says():
    found = machine.parsed(NVIDIA_SMI, machine.GPU_FIELDS)
    assert (
        found["name"] == "NVIDIA H200"
        and found["compute_cap"] == "9.0"
        and found["clocks.sm"] == "1980"
    )
    assert "power.draw" not in found  # [N/A]
    assert machine.parsed("", machine.CLOCKS) == {}
    assert machine.parsed('Field "x" is not a valid field to query.\n', machine.CLOCKS) == {}


def test_nvidia_smi_that_does_not_know_a_field(tmp_path, monkeypatch):
    """An old driver fails for all where it does not know one; then each is asked alone."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *=clocks.sm) echo 1980;; *) echo no >&2; exit 2;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.query(machine.CLOCKS) == {"clocks.sm": "1980"}


class Broken(Contestant):
    name = "a broken peer"

    def optimizer(self, params):
        raise RuntimeError("cannot\nbe built")


class Absent(Contestant):
    name = "an absent peer"
    package = "no_such_package"


@pytest.fixture(scope="module")
def result():
    """A whole result, recorded here with few contestants and sizes that take no time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(roster, "ALL", (Torch, Eight, Broken, Absent, Copy))
    patch.setattr(roster, "GROWING", (Torch, Eight))
    tiny = dataclasses.replace(
        settings.TINY,
        limit=1 << 13,
        largest=12,
        threads=(1, 2),
        gib=1e-4,
        trained=("torch fused, float32",),
    )
    threads = torch.get_num_threads()
    try:
        yield json.loads(
            json.dumps(command.measure(tiny, ["step", "growth", "training", "checkpoint"]))
        )
    finally:
        torch.set_num_threads(threads)
        patch.undo()


def test_a_result_has_everything_and_a_page(result):
    assert not result["failed"], result["failed"]
    said = result["machine"]
    assert said["cpu"] and said["date"] and said["versions"]["torch"] and said["isa"]
    assert len(result["step"]) == 3 * 2  # workloads, numbers of threads
    rows = {r["name"]: r for r in result["step"][0]["rows"]}
    assert rows[Torch.name]["to_torch"] == 1 and rows[Copy.name]["to_copy"] == 1
    missing = result["step"][0]["missing"]
    assert missing == {
        "a broken peer": "RuntimeError: cannot",
        "an absent peer": "the package no_such_package is not installed",
    }
    text = page.page(result, "python -m bench")
    for there in (
        "## The step",
        "## Cost as size grows",
        "## Whole training steps",
        "## Checkpoints",
        Eight.name,
        "2^12",
        said["date"],
        "a broken peer",
    ):
        assert there in text, there


def test_what_was_measured_before_a_section_ended_is_kept(tmp_path, monkeypatch):
    """On a machine that is lent for minutes: of a bench that is killed,
    or of which a part fails.
    """
    file, seen = tmp_path / "out" / "x.json", []

    class Section:
        @staticmethod
        def run(chosen, say):
            yield {"threads": 1, "ns_per_parameter": {"a": [[1024, 2.0]]}, "overhead": {}}
            seen.append(json.loads(file.read_text()))
            raise RuntimeError("no memory")

    monkeypatch.setattr(command, "SECTIONS", {"growth": Section})
    made = command.measure(settings.TINY, ["growth"], file)
    assert seen[0]["growth"] == made["growth"] and not seen[0]["failed"]
    text = page.page(made, "x")
    assert "2^10" in text and "Failed: RuntimeError: no memory" in text
    assert [p.name for p in file.parent.iterdir()] == ["x.json"]


def test_what_record_writes(result, tmp_path):
    command.keep(result, tmp_path)
    assert json.loads((tmp_path / "bench" / "results" / "cpu.json").read_text()) == result
    assert Eight.name in (tmp_path / "docs" / "speed" / "bench-cpu.md").read_text()
    before = f"above\n{command.MARKS[0]}\nold\n{command.MARKS[1]}\nbelow\n"
    (tmp_path / "docs" / "speed" / "bench.md").write_text(before)
    command.keep({**result, "settings": "quick"}, tmp_path)
    text = (tmp_path / "docs" / "speed" / "bench.md").read_text()
    assert (
        text.startswith("above\n")
        and text.endswith("\nbelow\n")
        and "old" not in text
        and Eight.name in text
    )


def test_docs_quote_the_recorded_quick_result():
    recorded = json.loads((ROOT / "bench" / "results" / "quick.json").read_text())
    measuring = (ROOT / "docs" / "speed" / "bench.md").read_text()
    assert page.quoted(measuring, command.MARKS, page.summary(recorded)) == measuring


def test_the_page_is_of_the_recorded_result():
    recorded = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text())
    written = (ROOT / "docs" / "speed" / "bench-cpu.md").read_text()
    pictures = [n for n in ("bench-cpu-step.png", "bench-cpu-growth.png") if n in written]
    assert written == page.page(recorded, "python -m bench --record", pictures)
    assert all((ROOT / "docs" / "pictures" / name).exists() for name in pictures)


def test_stages_do_not_stop_each_other(tmp_path):
    def stage(name, code, limit=120.0, **options):
        return Stage(name, limit, [sys.executable, "-c", code], **options)

    stages = [
        stage("fine", "print('hello')", read=lambda text: {"word": text.strip()}),
        stage("bad", "raise SystemExit(3)", read=lambda text: {}["hole"]),
        Stage("absent", 20, "no such tool"),
        Stage("nowhere", 20, [str(tmp_path / "nothing")]),
        stage("long", "import time; print('began', flush=True); time.sleep(60)", limit=5.5),
        stage("next", "pass", after="bad"),
    ]
    said = [s.run(tmp_path, 1000, {"fine"}) for s in stages]
    assert [s["status"] for s in said] == [
        "passed",
        "failed",
        "missing",
        "failed",
        "timed out",
        "left out",
    ]
    assert said[0]["word"] == "hello" and said[1]["code"] == 3 and "KeyError" in said[1]["unread"]
    assert said[4]["seconds"] < 30 and "began" in said[4]["tail"]
    assert stages[0].run(tmp_path, 1, set())["tail"] == "no time left"


def test_what_pytest_and_the_sanitizers_say(tmp_path):
    report = tmp_path / "tests.xml"
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no card')\ndef test_c(): pass\n"
    )
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        str(tmp_path),
    ]
    subprocess.run(run, capture_output=True, cwd=tmp_path)
    found = junit(report)("")
    assert found["tests"] == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1, "passed": 1}
    assert "test_b" in found["failures"][0] and found["skipped"] == {"no card": 1}

    log = tmp_path / "memcheck.txt"
    log.write_text(
        "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n"
        "=========     at k+0x90\n========= ERROR SUMMARY: 1 error\n"
    )
    found = sanitizer(log)("a PASSED\n")
    assert found["summary"] == "ERROR SUMMARY: 1 error" and len(found["errors"]) == 1
    assert "ended before its summary" in sanitizer(tmp_path / "none.txt")("")["summary"]
    log.write_text(
        "========= COMPUTE-SANITIZER\n========= Error: Race reported between Write access at 0x30\n"
        "========= and Read access at 0x50 [64 hazards]\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    assert len(sanitizer(log)("")["errors"]) == 2
    log.write_text(
        "========= COMPUTE-SANITIZER\n"
        "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    )
    assert sanitizer(log)("")["errors"] == []


def test_a_contestant_that_fails_leaves_the_others(monkeypatch):
    """On a card a baseline may break in its second step, after it was prepared."""

    class Breaks(Eight):
        name = "breaks in a later turn"
        left = 5

        def step(self):
            self.left -= 1
            if self.left < 0:
                raise ValueError("the fifth step was the last\nof many")
            super().step()

    class BreaksAtOnce(Breaks):
        name = "breaks at once"
        left = 0

    monkeypatch.setattr(roster, "ALL", (Torch, Breaks, BreaksAtOnce, Eight))
    chosen = settings.Settings("tiny", threads=(1,), rounds=3)
    (result,) = step.case(chosen, print, workload.THOUSAND, [(64, 64)], "", {})
    assert [r["name"] for r in result["rows"]] == [Torch.name, Eight.name]
    assert result["missing"][Breaks.name] == "ValueError: the fifth step was the last"
    assert BreaksAtOnce.name in result["missing"]


@pytest.mark.parametrize("many", [[], ["--numprocesses", "1"]], ids=["one", "xdist"])
def test_what_is_known_of_tests_that_were_killed(tmp_path, many):
    """The options of the stages, beside the project's own, print a line for each test,
    before it is too late.
    """
    if many:
        pytest.importorskip("xdist")
    (tmp_path / "test_x.py").write_text(
        "import os, signal, pytest\ndef test_a(): pass\n@pytest.mark.parametrize('x', ['a b'])\n"
        "def test_b(x): assert 1 == 2\n"
        "def test_c(): os.kill(os.getppid() if 'PYTEST_XDIST_WORKER' in os.environ else "
        "os.getpid(), signal.SIGKILL)\n"
    )
    stage = next(s for s in gpu.stages(tmp_path, [], "9.0") if s.name == "cuda-tests")
    left_out = ("-p", "--numprocesses", "--dist")
    options = [word for word in stage.command[3:] if word.startswith("-")]
    options = [word for word in options if "junit" not in word and word not in left_out]
    run = [sys.executable, "-m", "pytest", "-q", "-rs", *options, *many, str(tmp_path)]
    # These tests themselves may be run by a worker of xdist, which is not the one to be killed.
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    text = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=alone).stdout
    found = junit(tmp_path / "none.xml")(text)
    assert found["tests"] == {"passed": 1, "failed": 1}, text
    assert "test_x.py::test_b[a" in found["failures"][0]


class Undead:
    """A process that hangs inside of a driver."""

    pid = -1

    def wait(self, limit):
        raise subprocess.TimeoutExpired("it", limit)


def test_a_stage_that_cannot_be_killed_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Undead())
    killed = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    said = Stage("stuck", 20, ["x"], read=lambda text: {"word": "known"}).run(tmp_path, 100, set())
    assert killed == [-1] and "cannot be killed" in said["status"] and said["word"] == "known"


def test_make_gpu_goes_on_behind_what_fails(result, tmp_path, monkeypatch, capsys):
    """The JSON and the page are there after every stage,
    and the exit status says that not all passed.
    """
    seen = []

    def stage(name, code, **options):
        before = (
            f"import json; print(len(json.load(open({str(tmp_path / 'gpu.json')!r}))['stages'])); "
            if seen
            else ""
        )
        seen.append(name)
        return Stage(name, 120, [sys.executable, "-c", before + code], **options)

    stages = [
        stage("build", "print('built')"),
        stage("tests", "raise SystemExit('one differs')", after="build"),
        stage("bench", "print(1)", read=lambda text: {"result": result}, after="build"),
        stage("behind", "pass", after="tests"),
        Stage("memcheck", 20, "compute-sanitizer was not found"),
    ]
    monkeypatch.setattr(gpu, "stages", lambda *_: stages)
    monkeypatch.setattr(gpu, "BEGAN", gpu.time.perf_counter())
    monkeypatch.setattr(
        gpu,
        "describe",
        lambda: {
            "date": "2026-11-21T10:00+00:00",
            "gpu": {"name": "NVIDIA H200"},
            "python": "3.12",
            "torch": "2.11.0",
            "cuda": "13.0",
            "commit": "a",
            "cores": 16,
            "nvcc": "13.0",
        },
    )
    assert gpu.run([], tmp_path) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [s["status"] for s in report["stages"]] == [
        "passed",
        "failed",
        "passed",
        "left out",
        "missing",
    ]
    assert [s["tail"].split("\n")[0] for s in report["stages"][1:3]] == ["1", "2"]
    text = (tmp_path / "gpu.md").read_text()
    assert (
        "Not passed: tests, behind, memcheck" in text
        and "one differs" in text
        and Eight.name in text
    )
    # Nothing is begun that has no time.
    monkeypatch.setattr(gpu, "BEGAN", gpu.time.perf_counter() - 60 * gpu.MINUTES)
    assert gpu.run([], tmp_path) == 1
    assert "no time left" in (tmp_path / "gpu.md").read_text()


def test_a_machine_without_git():
    assert gpu.printed("no-such-tool", "--version") == ""


def test_the_page_of_make_gpu(result, tmp_path):
    """From a report as `make gpu` writes it, with a failed, a missing and a passed stage."""
    on_gpu = {
        **result,
        "machine": {**result["machine"], "cuda": "13.0", "gpu": {"name": "NVIDIA H200"}},
    }
    clocks = machine.parsed("1980, 3201, 41, 690.1, 0x0", machine.CLOCKS)
    on_gpu["step"] = [{**c, "clocks": clocks} for c in on_gpu["step"] if c["threads"] == 1]
    only_step = {**on_gpu}
    rest = {k: v for k, v in on_gpu.items() if k != "step"}
    del only_step["growth"]
    report = {
        "machine": {
            "date": "2026-11-21T10:00+00:00",
            "gpu": machine.parsed(NVIDIA_SMI, machine.GPU_FIELDS),
            "python": "3.12.3",
            "torch": "2.11.0",
            "cuda": "13.0",
            "commit": "abc",
            "cores": 16,
            "nvcc": "release 13.0",
        },
        "clocks_after": clocks,
        "seconds": 400.0,
        "stages": [
            {"name": "build", "status": "passed", "seconds": 60.0, "tail": ""},
            {
                "name": "cuda-tests",
                "status": "failed",
                "seconds": 60.0,
                "tail": "assert ```x```",
                "tests": {"passed": 8, "failures": 1},
                "failures": ["t::x: 1 differs"],
            },
            {
                "name": "memcheck",
                "status": "missing",
                "seconds": 0.0,
                "tail": "compute-sanitizer was not found",
            },
            {
                "name": "bench-step",
                "status": "passed",
                "seconds": 9.0,
                "tail": "",
                "result": only_step,
            },
            {"name": "bench-rest", "status": "passed", "seconds": 9.0, "tail": "", "result": rest},
        ],
    }
    gpu.write(report, tmp_path / "gpu.json")
    text = (tmp_path / "gpu.md").read_text()
    for there in (
        "NVIDIA H200",
        "580.159.04",
        "Not passed: cuda-tests, memcheck",
        "t::x: 1 differs",
        "8 passed",
        "not found",
        "clocks.sm 1980",
        "## In short",
        "## Cost as size grows",
        Eight.name,
    ):
        assert there in text, there
    again = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--page", str(tmp_path / "gpu.json")], cwd=ROOT
    )
    assert again.returncode == 0 and (tmp_path / "gpu.md").read_text() == text


def test_stages_of_make_gpu(tmp_path, monkeypatch):
    """What would run: every stage but the build needs the build alone,
    and together they have a chance to end in time.
    """
    monkeypatch.setattr(gpu_stages, "found_tool", lambda name, first="": f"/tools/{name}")
    made = gpu.stages(tmp_path, ["-C", "cmake.define.LOWBIT_TOOLS=OFF"], "9.0")
    assert made[0].name == "build" and all(s.after == "build" for s in made[1:])
    assert {
        "-C",
        "cmake.define.LOWBIT_CUDA_ARCHS=90-real",
        "--no-index",
        "--no-build-isolation",
    } <= set(made[0].command)
    by_name = {s.name: s for s in made}
    assert by_name["cuda-tests"].env["LOWBIT_REQUIRE"] == "cuda"
    assert {"memcheck", "racecheck"} <= set(by_name)
    tests = (ROOT / "tests" / "cuda" / "test_cuda.py").read_text()
    for name in gpu_stages.SMALL.replace("(", "").replace(")", "").split(" or "):
        assert f"def {name.split(' and ')[0]}" in tests, name
    monkeypatch.setattr(gpu_stages, "found_tool", lambda name, first="": None)
    lacking = {s.name: s for s in gpu.stages(tmp_path, [], "9.0")}
    assert isinstance(lacking["memcheck"].command, str)


def test_without_a_gpu_it_says_so_at_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["python -m bench.gpu"])
    assert gpu.main() == 2
    said = capsys.readouterr().err
    assert "make gpu cannot run here" in said and ("sees no GPU" in said or "without CUDA" in said)
    monkeypatch.setattr(sys, "argv", ["python -m bench", "--device", "cuda"])
    with pytest.raises(SystemExit) as left:
        command.main()
    assert left.value.code == 2 and "sees no GPU" in capsys.readouterr().err
