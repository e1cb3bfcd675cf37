"""The step on the host beside its peers: a row for each that is here, relative to the first."""

import pytest

from bench.contestants import baselines, ours
from bench.speed import offload

pytestmark = pytest.mark.slow


def test_rows_are_contestants_with_what_they_hold(monkeypatch):
    monkeypatch.setattr(offload, "FIRST", baselines.Torch)
    monkeypatch.setattr(offload, "CONTESTANTS", (baselines.Torch, ours.Eight, ours.Wide))
    ticks = iter(range(1000))
    rows = offload.measure([(64, 256), (64, 512)], 3, 2, lambda: float(next(ticks)))
    assert [row[0] for row in rows] == [k.name for k in offload.CONTESTANTS]
    assert [row[2] for row in rows] == ["1.00"] * 3, "each turn took one tick"
    assert [row[3] for row in rows] == ["16.00", "6.03", "12.00"]
