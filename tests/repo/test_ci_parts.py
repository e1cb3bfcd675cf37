"""The parts of CI that run on machines beside each other are all of it, each once."""

import json
import re
import subprocess
import types

import pytest

from tests.support import selection
from tests.support.paths import ROOT


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_slow_file_is_in_one_part(count):
    slow = {
        path
        for path in selection.TESTS.rglob("test_*.py")
        if {"slow", "whole"} & set(selection.marks_of(path)) == {"slow"}
    }
    parts = [slow - selection.elsewhere(f"{i + 1}/{count}") for i in range(count)]
    assert sum(map(len, parts)) == len(slow) > 100 and set().union(*parts) == slow
    took = json.loads(selection.DURATIONS.read_text())
    seconds = [sum(took.get(path.name, 1) for path in part) for part in parts]
    assert max(seconds) <= 1.1 * min(seconds)


def test_the_workflow_has_every_part():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (line,) = re.findall(r"part: \[(.*)\]", workflow)
    parts = [part.strip(' "') for part in line.split(",")]
    slow = sum(part.startswith("slow ") for part in parts)
    assert parts == ["first", "cpp", *(f"slow {i + 1}/{slow}" for i in range(slow))] and slow > 1


def test_the_nightly_workflow_calls_verbs():
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    verbs = set(re.findall(r"^ +- make ([a-z-]+)", workflow, re.M))
    known = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert len(verbs) > 5 and verbs <= known


@pytest.mark.parametrize(
    "arguments", [["quick"], ["slow"], ["slow", "0/3"], ["slow", "1"], ["first", "1/3"]]
)
def test_a_part_that_does_not_exist_starts_nothing(arguments):
    done = subprocess.run([ROOT / ".ci" / "run", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "slow I/N" in done.stdout and "==" not in done.stdout


@pytest.mark.parametrize("part", ["0/3", "4/3", "1/0", "2", "a/b", ""])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(pytest.UsageError, match="it is I/N, such as 2/3, with I from 1 to N"):
        selection.elsewhere(part)


def test_another_part_is_not_collected(monkeypatch):
    """By the hook that `make slow` has pytest call."""
    config = types.SimpleNamespace(option=types.SimpleNamespace(markexpr="slow"), args=[])
    taken = []
    for i in (1, 2):
        monkeypatch.setenv("LOWBIT_PART", f"{i}/2")
        files = selection.TESTS.rglob("test_*.py")
        taken.append({p for p in files if not selection.pytest_ignore_collect(p, config)})
    assert len(taken[0]) > 50 and len(taken[1]) > 50 and not taken[0] & taken[1]
