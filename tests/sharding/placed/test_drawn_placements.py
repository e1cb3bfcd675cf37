"""For every rule and format, any shape of 1 to 5 dimensions and any placement that DTensor allows:
the bits of one process, or refused at construction.

Draws are the same in every run. Others: LOWBIT_SEED=1 python -m pytest
tests/sharding/placed/test_drawn_placements.py
"""

import collections
import os

import pytest

from tests.sharding.placed import drawn, drawn_worker
from tests.sharding.placed.placed_cases import CASES
from tests.support.selection import WHOLE

pytestmark = pytest.mark.product

SEED = int(os.environ.get("LOWBIT_SEED", "0"))
COUNT = {2: 100, 3: 100, 4: 140, 8: 40} if WHOLE else {2: 34, 3: 34, 4: 47, 8: 14}  # products
# Why a draw is refused: what its words say first.
REASONS = {
    "several runs": "give one rank several runs of dimension",
    "whole rows": "of it needs whole rows",
    "in a byte": "inside a byte of",
    "bytes elsewhere": "would cut the ",
    "nowhere": "where its state cannot lie",
    "rank1": "scale='rank1' of ",
    "Muon": "Muon takes dimension 2 alone",
}
# Of the draws of seed 0. Another rule or format of the catalog draws others: then write what the
# assertion shows, if each of it is meant.
OUTCOMES: dict[str, dict[int, dict[str, int]]] = {
    "products": {
        2: {"alone": 1, "bytes elsewhere": 1, "in a byte": 1, "same": 84, "several runs": 8,
            "whole rows": 5},
        3: {"alone": 2, "in a byte": 1, "nowhere": 1, "same": 89, "several runs": 7},
        4: {"Muon": 1, "alone": 2, "bytes elsewhere": 1, "nowhere": 3, "same": 119,
            "several runs": 8, "whole rows": 6},
        8: {"Muon": 1, "nowhere": 4, "same": 29, "several runs": 5, "whole rows": 1},
    },
    "a third of the products": {
        2: {"alone": 1, "same": 31, "several runs": 2},
        3: {"alone": 2, "in a byte": 1, "nowhere": 1, "same": 27, "several runs": 3},
        4: {"alone": 1, "nowhere": 2, "same": 41, "several runs": 2, "whole rows": 1},
        8: {"nowhere": 3, "same": 8, "several runs": 3},
    },
    "catalog": {
        2: {"same": 257, "several runs": 5},
        3: {"bytes elsewhere": 1, "nowhere": 1, "same": 250, "several runs": 12},
        4: {"bytes elsewhere": 3, "in a byte": 1, "nowhere": 8, "rank1": 1, "same": 236,
            "several runs": 13},
    },
}  # fmt: skip


def reason(words):
    at = {name: words.index(said) for name, said in REASONS.items() if said in words}
    assert at, f"no known reason: {words}"
    return min(at, key=at.__getitem__)


def served_as_before(which, ranks, made):
    """How many are served, and how many refused for which reason: one refusal more of what was
    served is seen.
    """
    found = collections.Counter(
        reason(words) if what == "refused" else what for _, what, words in made
    )
    if SEED == 0:
        assert dict(sorted(found.items())) == OUTCOMES[which][ranks]


def outcomes_of(pool, ranks, draws):
    """[(draw, outcome, words)]; the ranks agree on each."""
    made = []
    several = pool.run(ranks, drawn_worker.compare, draws)
    for draw, *found in zip(draws, *several, strict=True):
        wrong = [words for outcome, words in found if outcome == "wrong"]
        assert not wrong, f"{draw}: {wrong}"
        assert len({outcome for outcome, _ in found}) == 1
        made.append((draw, *found[0]))
    rows = {("R",), ("S", 0)}
    unserved = [
        (draw, words)
        for draw, what, words in made
        if what == "refused" and all(rows.issuperset(spot.placements) for spot in draw.spots)
    ]
    assert unserved == [], "whole rows are always served"
    print(f"{ranks} ranks: {dict(collections.Counter(what for _, what, _ in made))}")
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_case_of_the_catalog_on_three_or_four_dimensions(pool, ranks):
    made = outcomes_of(pool, ranks, drawn.catalog(ranks, SEED))
    served_as_before("catalog", ranks, made)
    same = {draw.rule for draw, outcome, _ in made if outcome == "same"}
    assert same == set(list(CASES)[ranks % 3 :: 3]), "each is cut at least once"


@pytest.mark.parametrize("ranks", COUNT)
def test_any_rule_format_shape_and_placement(pool, ranks):
    made = outcomes_of(pool, ranks, drawn.products(ranks, COUNT[ranks], SEED))
    served_as_before("products" if WHOLE else "a third of the products", ranks, made)
    counts = collections.Counter(outcome for _, outcome, _ in made)
    assert counts["same"] > len(made) / 2
    assert counts["refused"] > len(made) / 50


EMPTY = drawn.Spot((1, 130), (2, 2), (("S", 0), ("S", 1)))  # no row of it on two of the ranks
# blocks are cut over both mesh dimensions
BOTH = drawn.Spot((6, 48), (2, 2), (("SS", 1, 2), ("S", 1)))


@pytest.mark.parametrize("rule", ["AdamW", "Lion", "LAMB", "Adafactor momentum"])
def test_ranks_without_a_part_reduce_in_the_order_of_the_others(pool, rule):
    """Else one rank agrees over rows first and another over columns,
    and neither has what all of them hold.
    """
    draws = [
        drawn.Draw(rule, spots, "8bit", "bfloat16")
        for spots in ((EMPTY, BOTH), (BOTH, EMPTY), (EMPTY, EMPTY, BOTH))
    ]
    assert {outcome for _, outcome, _ in outcomes_of(pool, 4, draws)} == {"same"}


def test_a_byte_that_differs_is_seen(pool):
    draw = drawn.Draw("AdamW", (drawn.Spot((6, 4), (2,), (("S", 0),)),))
    of_the_other = "False" if WHOLE else "True"  # rank 0 looks at what is gathered, or at its part
    assert pool.run(2, drawn_worker.one_byte_off, draw) == [f"True {of_the_other}", "False False"]
