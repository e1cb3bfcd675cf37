"""More tables of docs/sharding-matrix.md: rules in every format, under FSDP2 and expert
parallelism, and kinds of checkpoints under each wrapper.

A cell of the first is what it is in test_matrix_rows.py. One of the second is "same bits" if what
the row above saved, by the same kind of state dict and files, loads with the bytes of one process,
also after 2 more steps, and what is saved here loads in one process.

    LOWBIT_RECORD=1 python -m pytest tests/sharding/test_matrix_products.py # writes
    matrix_products.json, matrix_kinds.json and the page
"""

import os

import matrix_run
import pytest
from matrix_page import same_as_recorded

pytestmark = pytest.mark.product

RECORD = os.environ.get("LOWBIT_RECORD") == "1"


def test_every_rule_in_every_format(pool):
    same_as_recorded("products", matrix_run.table(pool, "products"), RECORD)


def test_every_kind_of_checkpoint(pool):
    same_as_recorded("kinds", matrix_run.kinds(pool), RECORD)
