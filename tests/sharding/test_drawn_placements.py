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
    unserved = [(draw, words) for draw, what, words in made if what == "refused" and rows.issuperset(draw.placements)]  # fmt: skip
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


def test_a_byte_that_differs_is_seen(pool):
    draw = drawn.Draw("AdamW", (6, 4), (2,), (("S", 0),))
    assert pool.run(2, "drawn_worker", "one_byte_off", draw) == ["True False", "False False"]
