"""Drawn cases of test_drawn_placements.py: a rule, its formats, a shape, and placements over a
mesh. The same seed draws the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.sharding.placed.placed_cases import CASES, PARAMS, RULES, STATES, dtype_of

LENGTHS = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 24, 32, 33, 47, 64, 128, 130)
MOST = 12_000  # elements
MESHES = {
    2: [(2,), (2,), (2,), (1, 2), (2, 1)],
    3: [(3,), (3,), (3,), (1, 3), (3, 1)],
    4: [(4,), (4,), (2, 2), (2, 2), (2, 2), (2, 2), (1, 4), (4, 1)],
    8: [(2, 2, 2)],
}

# ("R",), ("S", dim) or ("SS", dim, split factor): placements without torch,
# so that draws travel between processes.
Placed = tuple[Any, ...]


@dataclass(frozen=True)
class Spot:
    """A parameter's shape and place."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placed, ...]


@dataclass(frozen=True)
class Draw:
    """The parameters of an optimizer, and how they are stepped."""

    rule: str  # of CASES, or of RULES if `state` is not empty
    spots: tuple[Spot, ...]
    state: str = ""
    param: str = ""
    min_numel: int | None = 1
    seed: int = 0  # of the random bits

    @property
    def dtype(self) -> torch.dtype:
        return PARAMS[self.param] if self.state else dtype_of(self.rule)

    def make(self, params: list[Any]) -> Any:
        if not self.state:
            return CASES[self.rule](params, min_numel=self.min_numel, seed=self.seed)
        options = {**STATES[self.state], "param_format": self.param}
        return RULES[self.rule](params, **options, min_numel=self.min_numel, seed=self.seed)


def shape_of(rng: random.Random, dims: Sequence[int]) -> tuple[int, ...]:
    shape = [rng.choice(LENGTHS) for _ in range(rng.choice(dims))]
    while math.prod(shape) > MOST:
        at = rng.randrange(len(shape))
        shape[at] = -(-shape[at] // 2)
    return tuple(shape)


def placements_of(rng: random.Random, mesh: tuple[int, ...], ndim: int) -> tuple[Placed, ...]:
    """Any that DTensor allows. State follows dimensions 0 and 1, or 0 and one other;
    the others are drawn less often.
    """
    dims = [d for d in (0, 0, 0, 1, 1, 2, 3, 4) if d < ndim]
    made: list[Placed] = []
    for size in mesh:
        dim, kind = rng.choice(dims), rng.random()
        if kind < 0.2:
            made.append(("R",))
        elif kind < 0.93:
            made.append(("S", dim))
        else:  # one rank has several runs, unless another mesh dimension shards the same
            made.append(("SS", dim, rng.choice((2, 3, size))))
    for i in range(len(made) - 1):  # FSDP over tensor parallelism
        if made[i][0] == "S" and made[i] == made[i + 1] and rng.random() < 0.5:
            made[i] = ("SS", made[i][1], mesh[i + 1])
    return tuple(made)


def catalog(ranks: int, seed: int) -> list[Draw]:
    """The catalog's cases that fall to this number of ranks, each with a shape of 3 or 4 dimensions
    on which rows are cut, and anywhere.
    """
    rng, made = random.Random(f"{seed} catalog {ranks}"), []
    for rule in list(CASES)[ranks % 3 :: 3]:
        dims = (3,) if "Muon" in rule else (3, 4)
        rows: dict[int, list[tuple[Placed, ...]]] = {
            1: [(("S", 0),)],
            2: [(("S", 0),) * 2, (("R",), ("S", 0)), (("S", 0), ("R",)), (("SS", 0, 2), ("S", 0))],
        }
        mesh = (2, 2) if ranks == 4 and rng.random() < 0.7 else (ranks,)
        shape = shape_of(rng, dims)
        first = (rng.choice((ranks, ranks + 1, 2 * ranks)), *shape[1:])
        by_rows = Spot(first, mesh, rng.choice(rows[len(mesh)]))
        anyhow = Spot(shape, mesh, placements_of(rng, mesh, len(shape)))
        made += [Draw(rule, (by_rows,), seed=rng.randrange(9)), Draw(rule, (anyhow,))]
    return made


def products(ranks: int, count: int, seed: int) -> list[Draw]:
    """Any rule x state x parameter format, of any shape of 1 to 5 dimensions, placed anyhow; every
    fourth optimizer has several parameters.
    """
    rng, made = random.Random(f"{seed} products {ranks}"), []
    for i in range(count):
        rule = rng.choice(list(RULES))
        several = rng.choice((2, 3)) if i % 4 == 3 else 1
        spots = []
        for _ in range(several):
            shape = shape_of(
                rng, (2, 2, 3) if rule in ("Muon", "NorMuon") else (1, 2, 2, 3, 3, 4, 5)
            )
            mesh = rng.choice(MESHES[ranks])
            # Of several, one that is refused would hide the others.
            deep = len(shape) if several == 1 else min(len(shape), 2)
            spots.append(Spot(shape, mesh, placements_of(rng, mesh, deep)))
        state, param = rng.choice(list(STATES)), rng.choice(list(PARAMS))
        made.append(
            Draw(rule, tuple(spots), state, param, rng.choice((1, 1, 1, None)), rng.randrange(9))
        )
    return made
