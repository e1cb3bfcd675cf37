"""Patterns on the command line choose what Python's fnmatch chooses,
as overrides= and full_precision= do.
"""

import fnmatch
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit import checkpoint
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()
ALPHABET = "ab.-]^!é界*[?"  # a backslash is shown as two
NAMES = sorted(
    {a + b for a in ALPHABET for b in ["", *ALPHABET]}
    | {"a.b.a", "model.layers.10.attn.weight", "a-é", "ab-ab-ab", "界界a"}
)
PATTERNS = [
    "*", "?", "??", "*.weight", "model.*.1?.*", "[ab]", "[!ab]", "[^a]", "[]]", "[!]]", "[a", "[!",
    "[a-]", "[-a]", "[a-é]", "[!a-é]", "é*", "?é", "[界]*", "\\*", "\\a", "a\\", "[\\]", "[*]",
    "[?]?", "[[]", "**a", "*a*b*", "a*", "[a-b]?[!.]*",
]  # fmt: skip

NOTHING = "matches nothing in the checkpoint; inspect lists its names"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("globs") / "names.pt"
    torch.save({name: torch.zeros(1) for name in NAMES}, path)
    return path


def chosen(path, pattern):
    try:
        report = checkpoint.inspect(path, include=[pattern])
    except checkpoint.CheckpointError as error:
        assert "matches nothing" in str(error), error
        return []
    return sorted(tensor["name"] for tensor in report["tensors"])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_as_in_python(path, pattern):
    assert chosen(path, pattern) == sorted(n for n in NAMES if fnmatch.fnmatchcase(n, pattern))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=st.text("ab-]!^\\é*[?", min_size=1, max_size=6))
def test_any_pattern_as_in_python(path, pattern):
    assert chosen(path, pattern) == sorted(n for n in NAMES if fnmatch.fnmatchcase(n, pattern))


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_an_exclusion_that_fits_nothing_is_said(path, tmp_path, command):
    """The target would have what it was to leave out."""
    options = ("--world-size", 1) if command == "reshard" else ()

    def written(*patterns):
        given = [word for pattern in patterns for word in ("--exclude", pattern)]
        return run(command, path, tmp_path / str(len(patterns)), *options, *given).stderr

    assert written("a*", "*.weight") == ""
    assert written("a*", "*.wieght", "xyz").splitlines() == [
        f"warning: --exclude '{pattern}' {NOTHING}" for pattern in ("*.wieght", "xyz")
    ]
    if command == "convert":
        report = checkpoint.convert(path, tmp_path / "by python", exclude=["*.wieght"])
        (line,) = report["warnings"]
        assert line.startswith("exclude='*.wieght' matches nothing")


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_an_exclusion_that_fits_nothing_is_said_where_nothing_is_written(path, command):
    given = (path, path) if command == "diff" else (path,)
    done = run(command, *given, "--exclude", "a*", "--exclude", "*.wieght")
    (line,) = [x.strip() for x in (done.stdout + done.stderr).splitlines() if "matches" in x]
    assert line == f"warning: --exclude '*.wieght' {NOTHING}"
    report = json.loads(run(command, *given, "--json", "--exclude", "*.wieght").stdout)
    assert report["warnings"] == [f"--exclude '*.wieght' {NOTHING}"]
    report = getattr(checkpoint, command)(*given, exclude=["*.wieght"])
    assert report["warnings"] == [f"exclude='*.wieght' {NOTHING}"]
    assert getattr(checkpoint, command)(*given, exclude=["*.weight"])["warnings"] == []
