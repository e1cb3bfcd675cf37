"""More rows of the matrix of docs/bits/sharding-matrix.md, on 4 and 8 ranks, the rules that
test_matrix.py leaves out, and rules in every format under FSDP2 and expert parallelism.

A cell is "same bits" if 10 steps give the bytes of one process, and what the row above saved loads,
with the bytes of one process, also after 2 more steps; the first row loads what one process saved,
and one process what each row saved. Else it has the refusal. `tests/sharding/matrix/rows.json` and
products.json are what this test found, and the page is written from them:

    LOWBIT_RECORD=1 python -m pytest tests/sharding/matrix/test_matrix_rows.py    # writes all of it

CI runs their pairs: test_matrix_pairs.py.
"""

import os

import pytest

from tests.sharding.matrix import rows_worker, run
from tests.sharding.matrix.page import same_as_recorded

pytestmark = pytest.mark.whole

RECORD = os.environ.get("LOWBIT_RECORD") == "1"


@pytest.fixture(scope="module")
def found(pool):
    """Wrapper -> number of ranks -> case -> "same bits" or the words of the refusal."""
    return run.table(pool, "wrappers")


def test_every_cell_is_what_was_recorded(found):
    same_as_recorded("wrappers", found, RECORD)


def test_a_difference_is_seen(pool, found):
    assert pool.run(1, rows_worker.nothing_loaded, "wrappers", pool.folder)[0]


def test_every_rule_in_every_format(pool):
    same_as_recorded("products", run.table(pool, "products"), RECORD)
