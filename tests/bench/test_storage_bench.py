"""bench.storage: that it runs, that no more bytes are read than its page says, and that the page
says what was recorded and no more.
"""

import copy
import json
import subprocess
import sys

import pytest

from bench.storage import measured as storage
from bench.storage import page as storage_page
from tests.support.paths import ROOT

pytestmark = pytest.mark.product

FACTS = {
    "cpu": "a CPU",
    "cores": 4,
    "memory_gib": 16.0,
    "system": "Linux",
    "python": "3",
    "versions": {"torch": "2", "lowbit": "1", "numpy": None},
    "date": "2026-01-02T03:04+00:00",
    "load": [0.5, 0, 0],
}
KILLS = {
    "machine": FACTS,
    "kills": 5,
    "ranks": 4,
    "mib": 16,
    "sync": True,
    "left": {"whole": 3, "whole, and one that is broken": 2},
    "seconds": 9.6,
}


def turns(best):
    """Three turns, the first one slow,
    with a pass of the collector: their least processor time is half of the best time.
    """
    return [[9.0, 9.0, 0.25], [best, best, 0.0], [2 * best, best / 2, 0.0]]


def made_up():
    """A result in which every target is met exactly."""
    saves = {
        f"{name}: {who}": turns(seconds)
        for name, (_, base) in storage_page.SAVES.items()
        for who, seconds in ((base, 1.0), ("lowbit", 1.2), ("torch", 3.0))
    }
    saves["save, page cache: nothing"] = turns(0.5)
    loads = {
        key: {
            "seconds": {
                "lowbit": turns(seconds),
                "lowbit, verify=False": turns(0.25),
                "torch": turns(1.0),
            },
            "bytes needed": 3 << 20,
            "bytes read to bytes needed": {
                "lowbit": 1.04,
                "lowbit, verify=False": 1.01,
                "torch": 2.01,
            },
        }
        for key, seconds in (("load0-2", 1.0), ("load0-4", 0.5), ("load1-2", 0.5))
    }
    found = {"save-2": saves, **loads}
    return {
        "machine": FACTS,
        "file_system": "ext4",
        "gib": 0.5,
        "rounds": 3,
        "synced": True,
        "states": {"float32": found, "8bit": copy.deepcopy(found)},
    }


def test_bytes_are_read_once(tmp_path):
    out = tmp_path / "storage.json"
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.storage",
            "--gib",
            "0.03",
            "--rounds",
            "1",
            "--json",
            str(out),
            "--folder",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(out.read_text())
    assert list(told["states"]) == ["float32"] and told["machine"]["versions"]["torch"]
    found = told["states"]["float32"]
    for what in ("load0-2", "load0-4", "load1-2"):
        # Beside the values there are headers of items, .metadata and lowbit.json: some 2 % of a
        # state as small as this one.
        assert 1 <= storage_page.read(found, what, "lowbit") < 1.06, what
    page = storage_page.page(told, KILLS)
    assert storage_page.saves(found) in ended.stdout and storage_page.saves(found) in page
    assert storage_page.loads(found) in ended.stdout and storage_page.loads(found) in page


def test_what_a_save_takes_besides_writing_is_said():
    found = made_up()["states"]["8bit"]
    said = " ".join(storage_page.besides(found).split())
    assert (
        said.startswith("A save with a writer that writes nothing")
        and "takes 0.500 (1.000) s." in said
    )
    assert said.endswith("of up to 0.250 s, in 3 of 9 turns of lowbit and in 3 of 9 of torch's.")
    for some in found["save-2"].values():
        for turn in some:
            turn[2] = 0.0
    assert "collector" not in storage_page.besides(found)


def test_targets_are_met_up_to_their_limits():
    for kind, found in made_up()["states"].items():
        assert storage_page.verdict(kind, found) == f"**{kind}**: 9 of 9 met."


@pytest.mark.parametrize(
    ("what", "key", "value", "said"),
    [
        (
            "save-2",
            "save, page cache: lowbit",
            1.21,
            "save, page cache: time / cp (1.21, target at most 1.20)",
        ),
        (
            "save-2",
            "save, on disk: lowbit",
            2.0,
            "save, on disk: time / cp (2.00, target at most 1.20)",
        ),
        (
            "save-2",
            "stall: lowbit",
            1.3,
            "async save: stall / memory copy (1.30, target at most 1.20)",
        ),
        (
            "load0-2",
            "seconds",
            1.01,
            "load on 2 ranks, as saved: time / torch (1.01, target at most 1.00)",
        ),
        (
            "load0-4",
            "seconds",
            0.51,
            "load on 4 ranks: torch / lowbit (1.96, target at least 2.00)",
        ),
        (
            "load1-2",
            "seconds",
            1.0,
            "load on 2 ranks, by columns: torch / lowbit (1.00, target at least 2.00)",
        ),
        (
            "load1-2",
            "bytes",
            1.06,
            "load on 2 ranks, by columns: bytes read / needed (1.1, target 1.0)",
        ),
    ],
)
def test_a_target_that_is_missed_is_said(what, key, value, said):
    result = made_up()
    found = result["states"]["8bit"][what]
    if key == "bytes":
        found["bytes read to bytes needed"]["lowbit"] = value
    elif key == "seconds":
        found["seconds"]["lowbit"] = turns(value)
    else:
        found[key] = turns(value)
    first, second = (storage_page.verdict(kind, some) for kind, some in result["states"].items())
    assert first == "**float32**: 9 of 9 met."
    assert " ".join(second.split()) == f"**8bit**: 8 of 9 met. Missed: {said}."
    assert storage_page.aims(result).count("**no**") == 1


def test_the_page_has_best_median_and_processor_times():
    page = storage_page.page(made_up(), KILLS)
    assert (
        "| on disk | 1.000 (2.000) | 3.000 (6.000) | 1.200 (2.400) | 3.00 | 1.20 | 1.500 | 0.600 |"
        in page
    )
    assert (
        "| on 4 ranks | 1.000 (2.000) | 0.500 (1.000) | 0.250 (0.500) | 0.50 | 2.010 | 1.040 | "
        "0.500 | 0.250 |"
    ) in page
    text = " ".join(page.split())
    assert "## 8bit state, 3 MiB" in text and "data on ext4; 3 rounds; load average 0.5" in text
    assert (
        storage_page.title_of("8bit, 4 times the parameters")
        == "8bit state of 4 times the parameters"
    )
    assert (
        "4 ranks save 16 MiB" in text
        and "At random moments, 5 times, " in text
        and "2 kills also left a broken save" in text
    )
    assert "busy with other work" not in text and "caches to disk before each save" in text
    assert "caches to disk" not in storage_page.page({**made_up(), "synced": False}, KILLS)
    facts = {**FACTS, "load": [2.1, 0, 0]}
    assert "busy with other work" in " ".join(
        storage_page.page({**made_up(), "machine": facts}, KILLS).split()
    )


@pytest.mark.parametrize("left", [{"whole": 4}, {"whole": 5, "lost": 1}])
def test_kills_that_do_not_add_up_are_refused(left):
    with pytest.raises(ValueError, match="run it again"):
        storage_page.killed({**KILLS, "left": left})


def test_the_page_is_that_of_the_results():
    result, kills = (json.loads(path.read_text()) for path in (storage.RESULTS, storage.KILLS))
    assert (ROOT / "docs" / "speed" / "bench-storage.md").read_text() == storage_page.page(
        result, kills
    )
    assert [*result["states"]] == [*storage.STATES] and kills["kills"] >= 100


def test_a_record_has_every_state(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.storage", "--record", "--state", "8bit"])
    with pytest.raises(SystemExit):
        storage.main()
    assert "measures every state" in capsys.readouterr().err
