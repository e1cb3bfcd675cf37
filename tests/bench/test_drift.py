"""The page of drifts is what was measured, presets.md agrees with it, and a simulation does not
depend on what runs beside it.
"""

import json
import re

import pytest

import lowbit
from bench.quality import drift, drift_page
from tests.support.paths import ROOT

RESULTS = json.loads(drift.RESULTS.read_text())


def test_the_page_is_that_of_the_results():
    assert (ROOT / "docs" / "loss" / "drift.md").read_text() == drift_page.page(RESULTS)


def test_presets_are_recommended_as_measured():
    text = (ROOT / "docs" / "presets.md").read_text()
    rows = re.findall(r"^\| (recommended|tolerated|warned about) \| (.*) \|$", text, re.M)
    listed = {name: verdict for verdict, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == drift_page.verdicts(RESULTS)
    assert sorted(listed) == sorted(preset["name"] for preset in lowbit.catalog()["presets"])


def test_verdicts_follow_the_limits():
    made = [
        drift_page.verdict(found)
        for found in (
            [0.1, 0.1, 0.1],
            [0.1, 9.0, 0.1],
            [0.2, 0.1, 0.1],
            [0.1, 0.1, 0.4],
            [0.31, 0, 0],
            [0, 0, 0.51],
            [None, 0, 0],
        )
    ]
    assert made == ["recommended", *["tolerated"] * 3, *["warned about"] * 2, "not measured yet"]


@pytest.mark.parametrize("state", drift.STATES)
def test_every_preset_was_measured(state):
    for name in drift.of_presets(drift.STATES[state].signed):
        measured = drift_page.numbers(RESULTS, state, name)
        assert None not in measured[:2], name
        assert all(-1.5 < x < 100 for x in measured if x is not None), name


def test_formats_are_simulated_alone_as_with_others():
    formats = ["dynamic8 stochastic", "bfloat16 nearest", "linear4 nearest"]
    alone, among = (list(drift.simulate("lion", (20, 40), some)) for some in (formats[:1], formats))
    assert [step for step, _ in alone] == [20, 40]
    for (_, one), (_, all_of_them) in zip(alone, among, strict=True):
        assert one[formats[0]] == all_of_them[formats[0]]
        assert set(all_of_them) == set(formats)
        assert (
            0
            < all_of_them["bfloat16 nearest"]["error"]
            < 0.05
            < all_of_them["linear4 nearest"]["error"]
        )


def test_nearest_bfloat16_inflates_a_second_moment_and_stochastic_does_not():
    ((_, found),) = drift.simulate(
        "exp_avg_sq_alike", (3000,), ["bfloat16 nearest", "bfloat16 stochastic"]
    )
    assert found["bfloat16 nearest"]["bias"] > 0.05
    assert abs(found["bfloat16 stochastic"]["bias"]) < 0.01


def test_what_is_missing_is_simulated_and_nothing_else():
    first, rest = drift.missing({}, "exp_avg", True)
    assert first[1] == drift.STEPS and rest[1] == drift.STEPS[:-1]
    assert not set(first[0]) & set(rest[0])
    assert set(first[0]) | set(rest[0]) == set(drift.specs(True))
    some = {"exp_avg": {str(n): {name: {} for name in first[0]} for n in drift.STEPS[:2]}}
    assert next(drift.missing(some, "exp_avg", True)) == (first[0], drift.STEPS[2:])
    whole = {"exp_avg": {str(n): {name: {} for name in drift.specs(True)} for n in drift.STEPS}}
    assert list(drift.missing(whole, "exp_avg", False)) == []
