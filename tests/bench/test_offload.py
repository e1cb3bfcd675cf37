"""The step on the host beside its peers: a row for each that is here, relative to the first."""

import pytest

from bench.contestants import baselines, ours
from bench.speed import offload

pytestmark = pytest.mark.slow


def test_rows_are_contestants_with_what_they_hold(monkeypatch):
    monkeypatch.setattr(offload, "FIRST", baselines.Torch)
    monkeypatch.setattr(offload, "CONTESTANTS", (baselines.Torch, ours.Eight, ours.Wide))
    seconds = {baselines.Torch: 4.0, ours.Eight: 3.0, ours.Wide: 6.0}
    passed = []
    for kind, of_a_step in seconds.items():
        step = kind.step
        monkeypatch.setattr(
            kind, "step", lambda self, s=step, took=of_a_step: (s(self), passed.append(took))
        )
    rows = offload.measure([(64, 256), (64, 512)], 3, 2, lambda: sum(passed))
    assert [row[0] for row in rows] == [k.name for k in offload.CONTESTANTS]
    assert [row[2] for row in rows] == ["1.00", "0.75", "1.50"]
    assert [row[3] for row in rows] == ["16.00", "6.03", "12.00"]
