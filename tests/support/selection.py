"""Which tests run, and in which order: a file says itself that it is slow, long or a product.

    pytestmark = pytest.mark.slow     not in `make check`: many processes, or more than 5 seconds
    pytestmark = pytest.mark.long     not in `make test` either, but in CI: half a minute or so
    pytestmark = pytest.mark.product  a product of rules, formats and wrappers, of which CI has
                                      every pair or a third; all of it in `make matrix`
    pytestmark = pytest.mark.whole    a whole product of which another file has every pair: in
                                      `make matrix`, or where it is named

Files that need what `make frameworks` installs are long. The files that took longest come first, so
that two workers end together, and products come last. LOWBIT_DURATIONS=1 records what each takes.
LOWBIT_PART=2/3 is the second of three parts of the slow files, of about the same length.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib
import re
import sys
import time

import pytest

KINDS = {
    "slow": ("slow",),
    "long": ("slow", "long"),
    "product": ("slow", "long", "product"),
    "whole": ("slow", "long", "product", "whole"),
}
# A recording, and `make matrix`, run every cell.
WHOLE = "1" in (os.environ.get("LOWBIT_WHOLE"), os.environ.get("LOWBIT_RECORD"))
LEFT_OUT = {"not slow": "slow", "not long": "long"}
SAID = re.compile(r"^pytestmark = [^\]]*?\bpytest\.mark\.(slow|long|product|whole)\b", re.M)
TESTS = pathlib.Path(__file__).parent.parent
DURATIONS = TESTS / "durations.json"


def marks_of(path: pathlib.Path) -> tuple[str, ...]:
    """The marks of a file of tests, by its text: it is not imported, which takes some seconds."""
    if path.parent.name == "frameworks":
        return KINDS["long"]
    said = SAID.search(path.read_text())
    return KINDS[said[1]] if said else ()


@functools.cache
def elsewhere(part: str) -> frozenset[pathlib.Path]:
    """Of "I/N", the slow files that the other parts have: each goes, the longest first, to the part
    that has least so far.
    """
    said = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = map(int, said.groups()) if said else (0, 0)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"LOWBIT_PART={part}: it is I/N, such as 2/3, with I from 1 to N")
    took = json.loads(DURATIONS.read_text())
    run = {"slow"} if WHOLE else {"slow", "whole"}
    files = [p for p in TESTS.rglob("test_*.py") if run & set(marks_of(p)) == {"slow"}]
    files.sort(key=lambda path: (-took.get(path.name, 1), path.as_posix()))
    load, others = [0] * count, set()
    for path in files:
        least = load.index(min(load))
        load[least] += took.get(path.name, 1)
        if least != number - 1:
            others.add(path)
    return frozenset(others)


def named(path: pathlib.Path, config: pytest.Config) -> bool:
    """Whether the command line has this file or a test of it."""
    return any(
        path.samefile(file)
        for arg in config.args
        if (file := arg.split("::")[0]).endswith(path.name)
    )


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    chosen = config.option.markexpr
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    if "whole" in marks_of(collection_path) and not (WHOLE or named(collection_path, config)):
        return True
    if collection_path in elsewhere(os.environ.get("LOWBIT_PART", "1/1")):
        return True
    if chosen in KINDS:  # -m slow: what has no such mark is not imported, in any of the workers
        return chosen not in marks_of(collection_path) or None
    return LEFT_OUT.get(chosen, "no mark") in marks_of(collection_path) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    took = json.loads(DURATIONS.read_text())
    for item in items:
        for mark in marks_of(item.path):
            item.add_marker(mark)
    items.sort(
        key=lambda item: (
            item.get_closest_marker("product") is not None,
            -took.get(item.path.name, 0),
        )
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """LOWBIT_UNTIL: seconds since 1970 after which no product begins, and says so. On a machine of
    the usual speed none is left out.
    """
    until = float(os.environ.get("LOWBIT_UNTIL", "inf"))
    if time.time() > until and item.get_closest_marker("product") is not None:
        pytest.skip("no time left for whole products: make matrix runs them")


_seconds: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[pathlib.Path(report.location[0]).name] += report.duration  # type: ignore[assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Records the files that take 5 seconds or more, if asked."""
    if "LOWBIT_DURATIONS" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    took = json.loads(DURATIONS.read_text()) | {n: round(s) for n, s in _seconds.items()}
    kept = {name: s for name, s in sorted(took.items(), key=lambda of: -of[1]) if s >= 5}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":  # the fast files of folders, and files, for make sanitize-python
    for path in map(pathlib.Path, sys.argv[1:]):
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            if not marks_of(file):
                print(file)
