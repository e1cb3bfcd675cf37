"""For every rule and format, any shape of 1 to 5 dimensions and any placement that DTensor allows: the bits of one process, or refused at construction.

Draws are the same in every run. Others: LOWBIT_SEED=1 python -m pytest tests/sharding/test_drawn_placements.py
"""

import collections
import os

import drawn
import pytest
from placed_cases import CASES

SEED = int(os.environ.get("LOWBIT_SEED", "0"))
COUNT = {2: 100, 3: 100, 4: 140, 8: 40}  # products


def outcomes_of(pool, ranks, draws):
    """[(draw, outcome, words)]; the ranks agree on each."""
    made = []
    several = pool.run(ranks, "drawn_worker", "compare", draws)
    for draw, *found in zip(draws, *several, strict=True):
        wrong = [words for outcome, words in found if outcome == "wrong"]
        assert not wrong, f"{draw}: {wrong}"
        assert len({outcome for outcome, _ in found}) == 1
        made.append((draw, *found[0]))
    rows = {("R",), ("S", 0)}
    unserved = [(draw, words) for draw, what, words in made if what == "refused" and all(rows.issuperset(spot.placements) for spot in draw.spots)]  # fmt: skip
    assert unserved == [], "whole rows are always served"
    print(f"{ranks} ranks: {dict(collections.Counter(what for _, what, _ in made))}")
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_case_of_the_catalog_on_three_or_four_dimensions(pool, ranks):
    made = outcomes_of(pool, ranks, drawn.catalog(ranks, SEED))
    same = {draw.rule for draw, outcome, _ in made if outcome == "same"}
    assert same == set(list(CASES)[ranks % 3 :: 3]), "each is cut at least once"


@pytest.mark.parametrize("ranks", COUNT)
def test_any_rule_format_shape_and_placement(pool, ranks):
    made = outcomes_of(pool, ranks, drawn.products(ranks, COUNT[ranks], SEED))
    counts = collections.Counter(outcome for _, outcome, _ in made)
    assert counts["same"] > len(made) / 2
    assert counts["refused"] > len(made) / 50


EMPTY = drawn.Spot((1, 130), (2, 2), (("S", 0), ("S", 1)))  # no row of it on two of the ranks
BOTH = drawn.Spot(
    (6, 48), (2, 2), (("SS", 1, 2), ("S", 1))
)  # blocks are cut over both mesh dimensions


@pytest.mark.parametrize("rule", ["AdamW", "Lion", "LAMB", "Adafactor momentum"])
def test_ranks_without_a_part_reduce_in_the_order_of_the_others(pool, rule):
    """Else one rank agrees over rows first and another over columns, and neither has what all of them hold."""
    draws = [drawn.Draw(rule, spots, "8bit", "bfloat16") for spots in ((EMPTY, BOTH), (BOTH, EMPTY), (EMPTY, EMPTY, BOTH))]  # fmt: skip
    assert {outcome for _, outcome, _ in outcomes_of(pool, 4, draws)} == {"same"}


def test_a_byte_that_differs_is_seen(pool):
    draw = drawn.Draw("AdamW", (drawn.Spot((6, 4), (2,), (("S", 0),)),))
    assert pool.run(2, "drawn_worker", "one_byte_off", draw) == ["True False", "False False"]
