"""Every rule, format and wrapper of docs/bits/sharding-matrix.md in pairs: a covering array of the
products that `make matrix` runs.

A cell is "same bits" if 4 steps give the bytes of one process. What the wrapper of the line above
saved loads with the bytes of one process, also after 2 more steps, and what each saved loads in one
process. Else a cell has the refusal. `tests/sharding/matrix/pairs.json` is what this test found:

    LOWBIT_RECORD=1 python -m pytest tests/sharding/matrix/test_matrix_pairs.py    # writes it
"""

import itertools
import os

import pytest

from tests.sharding.matrix import rows_worker, run
from tests.sharding.matrix.cases import (
    COLUMNS_IN_PAIRS,
    IN_PAIRS,
    PAIRS_UNDER,
    PLACES,
    REFUSED_UNDER,
    refused_under,
    rules_in,
)
from tests.sharding.matrix.page import recorded, same_as_recorded
from tests.sharding.matrix.run import SAME

pytestmark = pytest.mark.long

RECORD = os.environ.get("LOWBIT_RECORD") == "1"
CELLS = [
    (wrapper, *name.rsplit(", ", 1)) for wrapper, names in PAIRS_UNDER.items() for name in names
]


@pytest.fixture(scope="module")
def found(pool):
    """Wrapper -> number of ranks -> case -> "same bits" or the words of the refusal."""
    return run.table(pool, "pairs")


def test_every_cell_is_what_was_recorded(found):
    same_as_recorded("pairs", found, RECORD)


def test_a_difference_is_seen(pool, found):
    assert pool.run(1, rows_worker.nothing_loaded, "pairs", pool.folder)[0]


def test_every_pair_is_run():
    """Each pair of a wrapper, a column of rules and a format, where neither is refused; and every
    rule.
    """
    column_of = {rule: column for column, rules in COLUMNS_IN_PAIRS.items() for rule in rules}
    assert {rule for _, rule, _ in CELLS} == {*column_of}
    served = [
        (wrapper, column_of[rule], form)
        for wrapper, rule, form in CELLS
        if not refused_under(wrapper, f"{rule}, {form}") and rule in rules_in(column_of[rule], form)
    ]
    pairs = {pair for cell in served for pair in itertools.combinations(cell, 2)}
    refused = sum(map(len, REFUSED_UNDER.values()))
    not_factored = sum(not rules_in(column, "factored8") for column in COLUMNS_IN_PAIRS)
    wrappers, columns, forms = len(PLACES), len(COLUMNS_IN_PAIRS), len(IN_PAIRS)
    assert (wrappers, columns, forms) == (16, 9, 9)
    wanted = wrappers * columns - refused + wrappers * forms + columns * forms - not_factored
    assert len(pairs) == wanted
    assert len(CELLS) < wanted / 2


def test_what_is_refused_in_pairs_is_refused_in_the_products():
    """The recorded cells agree with the rows of the page."""
    known = recorded()
    rows = {**known["first"], **{w: by[next(iter(by))] for w, by in known["wrappers"].items()}}
    for wrapper, by in known["pairs"].items():
        for name, words in next(iter(by.values())).items():
            rule, form = name.rsplit(", ", 1)
            refused = refused_under(wrapper, name) or rule not in rules_in(
                next(c for c, rules in COLUMNS_IN_PAIRS.items() if rule in rules), form
            )
            assert (words != SAME) == refused, (wrapper, name)
            if rule in rows[wrapper] and form == "8bit":
                assert (rows[wrapper][rule] == SAME) == (words == SAME), (wrapper, name)
