"""Confidence intervals of the mean of paired differences, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# The 0.975 quantile of Student's t for 1, 2, ... degrees of freedom (tables of any textbook, such
# as NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2).
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Interval(NamedTuple):
    """The mean of differences and half the width of its 95 % confidence interval,
    infinite for one difference.
    """

    mean: float
    half: float

    @property
    def shown(self) -> str:
        """What the interval says: "more", "less", or "" if 0 is inside."""
        return "" if abs(self.mean) <= self.half else "more" if self.mean > 0 else "less"

    def __str__(self) -> str:
        mean = round(self.mean, 4) + 0.0  # no -0.0000
        return f"{mean:+.4f}" + (f" ± {self.half:.4f}" if math.isfinite(self.half) else "")


def interval(differences: Sequence[float]) -> Interval:
    count = len(differences)
    if count < 2:
        return Interval(differences[0], math.inf)
    if count - 2 >= len(QUANTILES):
        raise ValueError(f"{count} differences are more than the table of quantiles has")
    error = statistics.stdev(differences) / math.sqrt(count)
    return Interval(statistics.fmean(differences), QUANTILES[count - 2] * error)
