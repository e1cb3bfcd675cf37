"""lowbit-ckpt on every hostile and odd checkpoint: refused in one line, soon, in little memory,
and nothing left behind.
"""

import atexit
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ckpt.hostile import BAD, CASES, FINE, PROOF, Case
from tests.ckpt.hostile.dcp import base
from tests.ckpt.hostile.state import Save, live, put
from tests.ckpt.hostile.write import P2, dump
from tests.support.paths import TESTS
from tests.support.peers.files import TOOL, need_tool
from tests.support.require import need

pytestmark = pytest.mark.long

HOSTILE = TESTS / "ckpt" / "hostile"
SECONDS, BYTES = 2.0, 200e6


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Names, kinds, sizes and times of everything below a folder."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
            found[os.path.relpath(path, root)] = (info.st_mode, size, info.st_mtime_ns)
    return found


@cache
def measurer() -> subprocess.Popen:
    program = [sys.executable, "-I", "-S", str(HOSTILE / "measure.py")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)  # the end of its input ends it
    return process


def run(cwd: Path, *command: object) -> dict:
    """Exit code, time, memory and output of a command."""
    process = measurer()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"command": list(map(str, command)), "cwd": str(cwd)}) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def judge(case: Case, done: dict, codes: frozenset[int] | None) -> None:
    """One line for an error, warnings alone otherwise, and the limits of time and memory."""
    said = f"{case}: exit {done['code']}: {done['err'][:2000]!r}\n{case.about}"
    assert 0 <= done["code"] <= 4, f"crashed or stopped: {said}"
    if codes is not None:
        assert done["code"] in codes, f"expected {sorted(codes)}: {said}"
    # Processor time: the machine is shared. What waits for something that never comes was stopped.
    assert done["cpu"] < SECONDS, f"{done['cpu']} s of {done['seconds']} s: {said}"
    assert done["bytes"] < BYTES, f"{done['bytes'] / 1e6} MB: {said}"
    text = done["err"]
    assert all(c == "\n" or (c.isprintable() and c.isascii()) for c in text), said
    lines = text.splitlines()
    errors = [line for line in lines if line.startswith("lowbit-ckpt: ")]
    notes = [line for line in lines if line.startswith("warning: ")]
    assert len(errors) + len(notes) == len(lines), f"lines that are neither: {said}"
    assert len(errors) == (done["code"] != FINE), said
    assert len(lines) <= 50 and all(len(line) <= 1000 for line in lines), f"too much: {said}"


@pytest.fixture(scope="session")
def commands() -> None:
    need_tool()


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_verify_and_convert(case: Case, tmp_path: Path, commands: None) -> None:
    path = case.make(tmp_path)
    before = tree(tmp_path)

    done = run(tmp_path, TOOL, "verify", path)
    judge(case, done, case.codes)
    if done["code"] != FINE:
        error = next(x for x in done["err"].splitlines() if x.startswith("lowbit-ckpt: "))
        error = error.replace(str(path), "").replace(str(tmp_path), "")  # names prove nothing
        assert case.mentions.search(error), f"{case}: no {case.mentions.pattern} in {error}"
    elif case.warns:
        notes = [x for x in done["err"].splitlines() if x.startswith("warning: ")]
        assert any(case.mentions.search(x.replace(str(tmp_path), "")) for x in notes), (
            f"{case}: no warning of {case.mentions.pattern} in {done['err']!r}"
        )
    assert tree(tmp_path) == before, "verify wrote something"

    done = run(tmp_path, TOOL, "convert", path, tmp_path / "out", "--to", "torch")
    judge(case, done, case.convert)
    after = tree(tmp_path)
    if done["code"] == FINE:
        after = {name: told for name, told in after.items() if name.split("/")[0] != "out"}
    assert after == before, f"{case}: left behind {sorted(set(after) ^ set(before))}"
    assert PROOF not in after


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.torch is not None], ids=str)
def test_what_torch_says(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is claimed of torch and safetensors holds,
    so that an input is as it is meant: accepted there, or refused.
    """
    monkeypatch.chdir(tmp_path)
    if case.name.startswith("safetensors."):
        need("safetensors", find_spec("safetensors") is not None, "safetensors is not installed")
    path = case.make(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(path)
            accepted, why = True, ""
        except BaseException as error:  # DCP's are not Exceptions
            if isinstance(error, KeyboardInterrupt):
                raise
            accepted, why = False, repr(error)[:500]
    assert accepted == case.torch, f"{case}: {why or 'was accepted'}"


def load(path: Path) -> object:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    if path.is_file():
        return torch.load(path, weights_only=True)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    reader, planner = dcp.FileSystemReader(path), _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def test_the_plain_checkpoints_are_whole(tmp_path: Path, commands: None) -> None:
    """Every input differs from one of these in what it is about; if these were refused,
    the rest would say nothing.
    """
    for path in (base().write(tmp_path), put(tmp_path, Save().bytes())):
        state = load(path)
        assert state["model"]["w"].shape == (4, 8)  # type: ignore[index]
        done = run(tmp_path, TOOL, "verify", path)
        assert (done["code"], done["err"]) == (FINE, "")
        done = run(tmp_path, TOOL, "convert", path, tmp_path / f"{path.name}.out", "--to", "torch")
        assert (done["code"], done["err"]) == (FINE, "")


def test_the_output_is_not_the_input(tmp_path: Path, commands: None) -> None:
    """Neither over it nor into it, by whatever name."""
    directory, file = base().write(tmp_path), put(tmp_path, Save().bytes())
    (tmp_path / "link").symlink_to(directory)
    before = tree(tmp_path)
    for source, target in (
        (directory, directory),
        (directory, tmp_path / "link"),
        (directory, directory / ".." / directory.name),
        (directory, directory / "__0_0.distcp"),
        (file, file),
        (file, tmp_path / "." / file.name),
    ):
        for force in ([], ["--force"]):
            done = run(tmp_path, TOOL, "convert", source, target, "--to", "torch", *force)
            assert done["code"] in (2, 3), f"{source} to {target}: {done}"
            assert tree(tmp_path) == before, f"{source} to {target}"


def test_the_payload_is_live(tmp_path: Path) -> None:
    """Python's own unpickler runs it: a tool that leaves no trace has not run it."""
    program = f"import pickle; pickle.loads({P2 + dump(live()) + b'.'!r})"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / PROOF).exists()


def test_a_plain_pickle_of_the_emitter() -> None:
    value = {"a": [1, -1, 1 << 40, 300, True, None, 0.5, "é\ud800"], (1, "b"): (), "c": {}}
    assert pickle.loads(P2 + dump(value) + b".") == value


def test_the_corpus_is_the_same_every_time(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Fuzzers start from it, and a failure is looked for by name.
    Only the absolute path names where it lies.
    """
    if Path("/dev/shm").is_dir():  # thousands of small files
        tmp_path = Path(tempfile.mkdtemp(dir="/dev/shm"))
        request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    bodies = []
    for name in ("a", "b"):
        body = {}
        for case in CASES.values():
            folder = tmp_path / name / case.name
            folder.mkdir(parents=True)
            path = case.make(folder)
            assert path.parent == folder
            for file in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
                assert file.stat().st_size <= 3 << 20, f"{case} is large"
                body[str(file.relative_to(tmp_path / name))] = file.read_bytes()
        bodies.append({k: v for k, v in body.items() if "path_absolute" not in k})
        shutil.rmtree(tmp_path / name)
    assert bodies[0] == bodies[1]
    assert sum(BAD in case.codes for case in CASES.values()) > 500
