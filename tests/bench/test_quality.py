"""The bench of quality: what has run is not run again, a run that was cut off continues to the same
bits, and the page says what was measured and no more.
"""

import dataclasses
import json
import math

import pytest
import torch

import lowbit
from bench.measuring.intervals import interval
from bench.measuring.recipe import load_recipe
from bench.pages.page import quoted
from bench.quality import page as quality_page
from bench.quality import plot as quality_plot
from bench.quality import runs as quality
from bench.quality import schedule as quality_schedule
from bench.quality import studies, zero_gradients
from bench.quality import train as quality_train
from bench.quality.studies import CONTESTANTS, SEEDS, STUDIES, Run
from tests.support.paths import ROOT

SMALL = STUDIES["0.5 M"]
RATE = SMALL.tuning("AdamW")[1].lr


def line(run, loss):
    return {
        **run.key(),
        "held_out_loss": loss,
        "parameters": 470_000,
        "losses": [3.0, 2.0],
        "bytes_per_parameter": {"state": 1.0},
        "date": "2026-01-01 00:00",
        "seconds": 1.0,
        "settings": {**STUDIES[run.study].settings(), "compute": "float32", "text_crc32": 1},
        "machine": {
            "cpu": "a CPU",
            "threads": 1,
            "isa": "avx2",
            "python": "3",
            "versions": {"torch": "2"},
        },
    }


@pytest.fixture
def tuned():
    """Lines of a tuning in which the second rate is best."""
    return [
        line(run, 2.0 + abs(i - 1))
        for rule in SMALL.rules()
        for i, run in enumerate(SMALL.tuning(rule))
    ]


def runs(name, losses):
    return [
        line(Run(SMALL.name, name, RATE, seed, SMALL.steps), loss)
        for seed, loss in zip(SEEDS, losses, strict=False)
    ]


def test_every_preset_is_compared():
    spelled = {
        c.state
        for name in SMALL.contestants
        for c in [CONTESTANTS[name]]
        if isinstance(c.state, str)
    }
    assert {preset["name"] for preset in lowbit.catalog()["presets"]} <= spelled
    assert all(len(SMALL.tuning(rule)) == len(studies.GRID) for rule in SMALL.rules())


def test_what_is_missing_follows_from_what_is_there(tuned):
    assert {run.seed for run in quality.missing([])} == {studies.TUNING_SEED}
    first = quality.missing(tuned)
    names = ("torch AdamW", "AdamW, 8bit", "AdamW, 4bit", "torch AdamW, start rounded")
    assert [(run.name, run.seed) for run in first[:5]] == [*((n, 0) for n in names), (names[0], 1)]
    # RATE is that of GRID
    second = {rule: SMALL.rates.get(rule, studies.GRID)[1] for rule in SMALL.rules()}
    assert all(
        run.lr == second[CONTESTANTS[run.name].rule] for run in first if run.study == SMALL.name
    )
    assert RATE in second.values()
    assert len(set(first)) == len(first)
    done = [line(first[0], 2.5), line(dataclasses.replace(first[1], lr=0.5), 2.5)]
    assert quality.missing([*tuned, *done]) == first[1:], "another rate is another run"


def test_some_contestants_bring_the_tuning_they_need(tuned):
    some = quality.missing([], [SMALL.name], ["Muon, 8bit"])
    assert some == SMALL.tuning("Muon")
    assert [run.seed for run in quality.missing(tuned, [SMALL.name], ["Muon, 8bit"])] == [*SEEDS]
    long = quality.missing([], ["0.5 M, 20,000 steps"])
    assert {run.study for run in long} == {SMALL.name}, "it takes the rates of the small study"


def test_a_line_that_was_cut_off_is_run_again(tmp_path, tuned):
    path = tmp_path / "lines.jsonl"
    assert quality.read(path) == []
    for one in tuned[:2]:
        quality.append(path, one)
    path.write_bytes(path.read_bytes() + json.dumps(tuned[2]).encode()[:-5])
    assert quality.read(path) == tuned[:2]
    quality.append(path, tuned[3])
    assert quality.read(path) == [*tuned[:2], tuned[3]]


def test_lines_of_other_settings_or_another_text_are_not_compared(tuned):
    other = json.loads(json.dumps(tuned[0]))
    other["settings"]["text_crc32"] = 2
    old = json.loads(json.dumps(tuned[1]))
    old["settings"]["batch"] = 99
    assert quality.comparable([other, old, *tuned]) == tuned


def test_intervals_are_those_of_student():
    made = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), so 2.776 sqrt(2.5 / 5)
    assert (made.mean, round(made.half, 3)) == (3.0, 1.963)
    assert made.shown == "more" and interval([-1.0, -2.0, -3.0, -4.0, -5.0]).shown == "less"
    assert interval([-1.0, 1.0]).shown == "" and interval([0.5]).half == math.inf


def test_the_page_has_what_has_run_and_says_what_has_not(tuned):
    base = [2.0, 2.1, 2.2, 2.3, 2.4]
    bit = [0.010, 0.012, 0.009, 0.011, 0.013]
    lines = [
        *tuned,
        *runs("torch AdamW", base),
        *runs("AdamW, 8bit", [x + d - 0.011 for x, d in zip(base, bit, strict=True)]),
        *runs("AdamW, 4bit", [x + d for x, d in zip(base, bit, strict=True)]),
        *runs("AdamW, fp8", [2.0, 2.1]),
        *runs("AdamW, log8", [2.5, 2.6, 2.7]),
        *runs("AdamW, 2bit", [None, 2.0, 2.0, 2.0, 2.0]),
    ]
    rows = {
        cells[1]: cells[2:-1]
        for x in quality_page.page(lines).splitlines()
        if x.startswith("| ")
        for cells in [[c.strip() for c in x.split("|")]]
        if len(cells) == 9
    }
    assert rows["torch AdamW"] == [""] * 6, "the study of 10 M has not run"
    text = quality_page.page(lines).split("## Long run")[0]
    assert f"| AdamW, 4bit | {RATE:g} | 5 | 2.2110 | **+0.0110 ± 0.0020** |  | 1.00 |" in text
    assert f"| AdamW, 8bit | {RATE:g} | 5 | 2.2000 | +0.0000 ± 0.0020 |  | 1.00 |" in text
    assert "| AdamW, 7bit |  |  |  |  |  |  |" in text and "2.0000 (1 diverged)" in text
    said = quality_page.conclusions(lines)
    assert said == [
        "**Use `8bit`**, the default: no study shows that it raises the loss.",
        (
            "**Avoid `4bit` and `log8` and `2bit` state.** They raised the loss; none of the other "
            "1 state formats was shown to."
        ),
    ]
    formats, weights, _, other, short, large = (row[1:] for row in quality_page.evidence(lines))
    higher, lower, same, few, waiting = formats
    assert "`4bit` (+0.0110 ± 0.0020), `log8`" in higher and "`2bit` (diverged)" in higher
    assert "(+0.5000 ± 0.0000, 3 seeds)" in higher and not lower
    assert "`8bit`" in same and few == "`fp8`" and "`float32`, `bfloat16`" in waiting
    assert weights[:4] == [""] * 4 and other[:4] == [""] * 4
    assert "`Muon, 8bit`" in short[4] and "`8bit`" in large[4]
    long = quality_page.over_long(lines, STUDIES["0.5 M, 20,000 steps"])
    assert long == "Over 20,000 steps: not run yet: `torch AdamW`, `AdamW, 8bit`, `AdamW, 4bit`."


def test_both_studies_of_a_larger_model_are_told_of():
    short = STUDIES["10 M, 160 steps"]
    tuned = [
        line(run, 2.0 + abs(i - 1))
        for rule in short.rules()
        for i, run in enumerate(short.tuning(rule))
    ]
    rate = short.tuning("Muon")[1].lr
    some = [
        line(Run(short.name, name, rate, seed, short.steps), 2.0 + more)
        for name, more in (("Muon, float32", 0.0), ("Muon, 8bit", 0.1))
        for seed in (0, 1, 2)
    ]
    short_row, large_row = quality_page.evidence([*tuned, *some])[4:]
    assert "160 steps" in short_row[0] and short_row[1] == "`Muon, 8bit` (+0.1000 ± 0.0000)"
    assert "1,000 steps" in large_row[0] and "`8bit`" in large_row[5]


def test_every_run_is_in_one_part_of_what_is_recorded():
    made: dict = {}
    for part in quality_schedule.parts():
        for name in part.names:
            made.setdefault((part.study.name, part.tunes, name), []).append(part.what)
    assert all(len(several) == 1 for several in made.values())
    runs = {(s.name, False, n) for s in STUDIES.values() for n in s.contestants}
    tunings = {
        (s.name, True, n) for s in STUDIES.values() if not s.tuned_in for n in s.rules().values()
    }
    assert set(made) == runs | tunings


def test_the_order_leaves_no_run_out():
    lines = [
        line(run, 2.0)
        for study in STUDIES.values()
        if not study.tuned_in
        for rule in study.rules()
        for run in study.tuning(rule)
    ]
    asked = [
        run for part in quality_schedule.parts() for _, run in quality_schedule.runs(lines, part)
    ]
    assert set(quality.planned(lines)) == set(asked) and len(set(asked)) == len(asked)


def test_a_study_says_how_fast_float32_still_improved():
    losses = [5.0, 4.0, 3.0, *[2.5] * 5, 2.25, 2.125]
    some = [
        {**x, "losses": [y + i for y in losses]}
        for i, x in enumerate(runs("torch AdamW", [2.0, 2.1]))
    ]
    tuned = [line(run, 2.0 + abs(i - 1)) for i, run in enumerate(SMALL.tuning("AdamW"))]
    said = " ".join(quality_page.flattening([*tuned, *some], SMALL).split())
    assert "`torch AdamW` fell by 1.000 from the first to the second tenth" in said
    assert "by 0.125 from the ninth to the last" in said
    assert quality_page.flattening(tuned, SMALL) == "", "nothing has run"


def test_curves_of_a_format_are_those_of_its_pairs(tuned):
    several = {"torch AdamW": [3.0, 2.0], "AdamW, 8bit": [3.5, 2.25]}
    lines = [
        *tuned,
        *(
            {**x, "losses": several[name]}
            for name, count in (("torch AdamW", 2), ("AdamW, 8bit", 3))
            for x in runs(name, [2.0] * count)
        ),
    ]
    apart = quality_plot.gaps(lines, SMALL, "AdamW, 8bit")
    assert apart == [[0.5, 0.25]] * 2, "the third seed has no pair"
    assert quality_plot.curve(apart, SMALL) == ([50, 100], [0.5, 0.25])


def test_what_is_missing_costs_the_steps_of_the_same_model(tuned):
    lines = [
        *tuned,  # 500 steps in 1 s
        *({**x, "seconds": 3.0 + i} for i, x in enumerate(runs("AdamW, 8bit", [2.0, 2.1, 2.2]))),
    ]
    accounts = {
        part.what: quality_schedule.account(lines, part) for part in quality_schedule.parts()
    }
    own = accounts["AdamW with `8bit` and `4bit`"]
    assert (own.planned, own.recorded, own.took) == (10, 3, [3.0, 4.0, 5.0])
    assert own.left == [3.0] * 7, "1,500 steps of 2 ms, the least of AdamW's"
    assert own.cells() == ["10", "3", "in part", "3 to 5", "3", "0.01"]
    rates = accounts["small model: rates of 6 rules, each among as many"]
    assert rates.left == [] and rates.cells() == ["48", "48", "all", "1", "", ""]
    counted = [{**x, "processor_seconds": 2.5 + i} for i, x in enumerate(lines[-3:])]
    own = quality_schedule.account([*lines[:-3], *counted], quality_schedule.parts()[2])
    assert own.left == [pytest.approx(3.5)] * 7, "the median of what the processor took"
    other = accounts["10 M parameters, 1,000 steps: float32, `8bit`, `4bit`, bfloat16 weights"]
    assert other.hours() is None and other.cells()[-1] == "unknown"
    few = [x for x in lines if x["run"].endswith("AdamW") or x["seed"] == 0]  # AdamW alone is tuned
    guessed = quality_schedule.account(few, quality_schedule.parts()[0])
    assert (guessed.planned, guessed.recorded, guessed.guessed) == (48, 8, True)
    assert guessed.cells()[4] == "1*", "with the steps of other rules"
    text = " ".join("\n".join(quality_schedule.section(lines)).split())
    assert "51 of 291 runs are recorded" in text and "more where nothing of a model has run" in text


def test_the_pages_are_those_of_the_results():
    lines = quality.comparable(quality.read())
    assert (ROOT / "docs" / "quality.md").read_text() == quality_page.page(lines)
    presets = (ROOT / "docs" / "presets.md").read_text()
    assert quality_page.of_presets(lines) in presets
    assert quoted(presets, quality_page.MARKS, quality_page.of_presets(lines)) == presets


@pytest.fixture(scope="module")
def small_text():
    recipe = load_recipe()
    return recipe, recipe.Text([], 32, limit=1 << 16)


def trained(name, small_text, tmp_path, steps=20, stop=None):
    recipe, text = small_text
    study = dataclasses.replace(
        SMALL,
        model={"width": 64, "depth": 1, "heads": 2, "context": 32},
        held_out=(1, 4),
        every=10,
        warm_up=5,
    )
    progress = quality_train.Progress(tmp_path, Run(SMALL.name, name, 4e-3, 0, steps), {})
    run = Run(SMALL.name, name, 4e-3, 0, steps)
    return quality_train.train(run, recipe, text, recipe.torch.float32, progress, study, stop)


KINDS = (
    "torch AdamW",
    "AdamW, 4bit",
    "AdamW, 8bit, bfloat16 weights stochastic",
    "AdamW, 8bit, then 4bit",
    "torch AdamW, then 8bit by lowbit-ckpt",
    "Adafactor with momentum, 8bit",
    "APOLLO, 8bit",
    "Muon, muon4",
)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(name, small_text, tmp_path):
    whole = trained(name, small_text, tmp_path / "whole")
    assert len(whole["losses"]) == 2 and whole["losses"][1] < whole["losses"][0]
    for stop in (7, 10, 13):  # before, at and after what happens in the middle
        with pytest.raises(KeyboardInterrupt):
            trained(name, small_text, tmp_path / "cut", stop=stop)
    again = trained(name, small_text, tmp_path / "cut")
    times = dict.fromkeys(("seconds", "processor_seconds"), 0)
    assert {**again, **times} == {**whole, **times}


def test_the_seconds_before_a_run_was_cut_off_count(small_text, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained("torch AdamW", small_text, tmp_path, stop=10)
    (path,) = tmp_path.iterdir()
    saved = torch.load(path, weights_only=True)
    assert all(0 < saved["clock"][k] < 100 for k in ("seconds", "processor_seconds"))
    torch.save({**saved, "clock": {"seconds": 1000.0, "processor_seconds": 2000.0}}, path)
    again = trained("torch AdamW", small_text, tmp_path)
    assert 1000 <= again["seconds"] < 1100 and 2000 <= again["processor_seconds"] < 2100


def test_a_run_that_diverges_ends_and_says_so(small_text, tmp_path, monkeypatch):
    monkeypatch.setattr(quality_train, "rate", lambda *_: 1e30)
    made = trained("torch AdamW", small_text, tmp_path)
    assert made["held_out_loss"] is None and made["diverged"] < 19
    assert quality.loss(made) == math.inf


def test_the_middle_changes_the_state(small_text, tmp_path):
    to_four = trained("AdamW, 8bit, then 4bit", small_text, tmp_path)
    four = trained("AdamW, 4bit", small_text, tmp_path)
    assert to_four["bytes_per_parameter"] == four["bytes_per_parameter"]
    assert to_four["held_out_loss"] != four["held_out_loss"]


def test_weights_without_gradients_stand_still_and_the_others_do_not():
    found = zero_gradients.measure(60, 20, ["8bit", "linear8", "float32"])
    assert all(x["never"] == 0 < x["trained"] for x in found.values())
    assert found["float32"]["stopped"] == 0 < found["8bit"]["stopped"] < found["linear8"]["stopped"]


def test_every_preset_was_measured_without_gradients():
    saved = json.loads(zero_gradients.RESULTS.read_text())["presets"]
    assert set(saved) == {preset["name"] for preset in lowbit.catalog()["presets"]}
    said, _ = zero_gradients.section(
        {
            "presets": {"a": {**saved["8bit"], "never": 1.0}, "b": saved["8bit"]},
            "steps": 1,
            "stop": 1,
            "date": "",
            "machine": {"cpu": "", "isa": "", "versions": {"torch": ""}},
        }
    )
    assert said.startswith("Weights that never had a gradient move with `a`, and stand still")
