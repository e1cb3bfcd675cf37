"""The bench of formats behind Newton-Schulz: its errors order formats as their bits do,
and the page has its tables.
"""

import json

import pytest
import torch

import lowbit
from bench.quality import muon_formats
from tests.support.paths import ROOT


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(muon_formats, "STEPS", 12)
    monkeypatch.setattr(muon_formats, "AT", (2, 12))
    monkeypatch.setattr(muon_formats, "SHAPE", (64, 128))
    monkeypatch.setattr(muon_formats, "POWERS", (1.0,))


def test_errors_grow_as_bits_go(short):
    gradients = muon_formats.synthetic()
    exact = muon_formats.references(gradients)
    made = {
        format: muon_formats.measure(lowbit.scaled(format), gradients, exact)["power 1"]
        for format in ("bfloat16", "linear8", "linear4")
    }
    last = [made[format]["12"] for format in ("bfloat16", "linear8", "linear4")]
    assert 0 < last[0]["momentum"] < 0.01 and 0.1 < last[2]["momentum"] < 0.5
    for key in ("momentum", "update", "small"):
        assert last[0][key] < last[1][key] < last[2][key]
    assert last[2]["descent"] < last[1]["descent"] < 1.01
    assert made["linear4"]["2"]["momentum"] < last[2]["momentum"], "errors of steps add up"


def test_the_exact_momentum_has_no_error(short):
    (exact,) = muon_formats.references(muon_formats.synthetic()).values()
    errors = exact[12].errors(exact[12].m)
    assert errors == {"momentum": 0, "update": 0, "small": 0, "descent": 1}
    assert exact[12].errors(torch.zeros_like(exact[12].m))["momentum"] == 1


def test_the_pages_have_the_tables():
    page = (ROOT / "docs" / "loss" / "muon-formats.md").read_text()
    saved = json.loads(muon_formats.RESULTS.read_text())
    assert {name for name, _ in muon_formats.specs()} == set(saved["formats"])
    rows = [row for row in muon_formats.tables(saved).splitlines() if row.startswith("|")]
    assert len(rows) > 40 and all(row in page for row in rows)
