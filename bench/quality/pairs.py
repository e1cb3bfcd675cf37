"""Runs in pairs: those of two contestants with the same seed."""

from __future__ import annotations

from typing import Any

from bench.measuring.intervals import Interval, interval
from bench.quality.runs import Lines, compared, found, loss
from bench.quality.studies import CONTESTANTS, Study

ENOUGH = 3  # seeds for a verdict; with fewer than the study's, the page gives their number


def runs_of(lines: Lines, study: Study, name: str) -> dict[int, dict[str, Any]]:
    """The finished runs of a contestant by seed."""
    some = [found(lines, run) for run in compared(lines, study, name)]
    return {line["seed"]: line for line in some if line}


def difference(lines: Lines, study: Study, name: str, to: str) -> Interval | None:
    """The held-out loss less that of another contestant, in pairs of one seed. None without pairs,
    or if a run diverged.
    """
    own, other = runs_of(lines, study, name), runs_of(lines, study, to)
    pairs = [loss(own[seed]) - loss(other[seed]) for seed in own if seed in other]
    if not pairs or max(map(abs, pairs)) == float("inf"):
        return None
    return interval(pairs)


def reference(study: Study, name: str) -> str:
    """What a contestant is compared with: the first one of its rule."""
    return study.rules()[CONTESTANTS[name].rule]
