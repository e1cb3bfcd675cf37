"""The bench of Muon's quality: what has run is not run again, a torn line does not count, and the page makes up nothing."""

import json

import pytest

from bench import muon_page, muon_quality
from bench.muon_quality import RATES, SEEDS, Run
from bench.training import load_recipe


def line(run, loss):
    return {**run.key(), "held_out_loss": loss, "parameters": 10_000_000, "losses": [3.0, 2.0], "state_bytes_per_parameter": 1.0, "date": "2026-01-01 00:00",
            "settings": {"compute": "float32"}, "machine": {"cpu": "a CPU", "isa": "avx2", "versions": {"torch": "2"}}}  # fmt: skip


@pytest.fixture
def tuned():
    """Lines of a tuning in which the second rate is best."""
    runs = [run for rule in RATES for run in muon_quality.tuning(rule)]
    return [line(run, 2.0 + abs(i % len(RATES["Muon"]) - 1)) for i, run in enumerate(runs)]


def test_what_is_missing_follows_from_what_is_there(tuned):
    first = [*muon_quality.missing([])]
    assert first == [run for rule in RATES for run in muon_quality.tuning(rule)], "nothing else is known before"  # fmt: skip
    rest = [*muon_quality.missing(tuned)]
    assert len(rest) == len(SEEDS) * len(muon_quality.CONTESTANTS)
    assert {run.lr for run in rest} == {rates[1] for rates in RATES.values()}
    done = [line(rest[0], 2.5), line(Run(rest[1].name, 0.5, rest[1].seed, rest[1].steps), 2.5)]
    assert [*muon_quality.missing([*tuned, *done])] == rest[1:], "another rate is another run"


def test_a_line_that_was_cut_off_is_run_again(tmp_path, tuned):
    path = tmp_path / "lines.jsonl"
    assert muon_quality.read(path) == []
    for one in tuned[:2]:
        muon_quality.append(path, one)
    path.write_bytes(path.read_bytes() + json.dumps(tuned[2]).encode()[:-5])
    assert muon_quality.read(path) == tuned[:2]
    muon_quality.append(path, tuned[3])
    assert muon_quality.read(path) == [*tuned[:2], tuned[3]]


def test_the_page_has_what_has_run_and_says_what_has_not(tuned):
    rest = [*muon_quality.missing(tuned)]
    some = {("Muon, float32", 0): 2.25, ("Muon, 8bit", 0): 2.5}
    lines = [*tuned, *(line(run, some[run.name, run.seed]) for run in rest if (run.name, run.seed) in some)]  # fmt: skip
    text = muon_page.section(lines)
    assert "| Muon, 8bit | 0.002 | 2.500 |  | 2.500 | +0.250 | 1.00 |" in text
    assert "Muon, 8bit (seed 1, 2)" in " ".join(text.split()) and "| AdamW, 8bit |" not in text
    assert "spread of float32's seeds" not in text, "no verdict on one seed"
    whole = [*tuned, *(line(run, 2.0 + 0.01 * run.seed + 0.5 * (run.name == "AdamW, 8bit")) for run in rest)]  # fmt: skip
    text = muon_page.section(whole)
    assert "Not run yet" not in text
    assert "**Muon, 8bit**: +0.000 on the mean of 3 seeds, within" in text
    assert "**AdamW, 8bit**: +0.500 on the mean of 3 seeds, beyond" in text


@pytest.mark.parametrize("name", muon_quality.CONTESTANTS)
def test_a_small_run_learns(name, monkeypatch):
    monkeypatch.setattr(muon_quality, "MODEL", {"width": 64, "depth": 1, "heads": 2, "context": 32})
    monkeypatch.setattr(muon_quality, "HELD_OUT", (1, 4))
    recipe = load_recipe()
    text = recipe.Text([], 32, limit=1 << 16)
    made = muon_quality.train(Run(name, 4e-3, 0, 20), recipe, text, recipe.torch.float32)
    again = muon_quality.train(Run(name, 4e-3, 0, 20), recipe, text, recipe.torch.float32)
    assert made["losses"][1] < made["losses"][0] - 0.1 and len(made["losses"]) == 2
    assert {**made, "seconds": 0} == {**again, "seconds": 0}
