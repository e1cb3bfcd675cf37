"""Kinds of checkpoints under each wrapper: the last table of docs/sharding-matrix.md.

A cell is "same bits" if what the row above saved, by the same kind of state dict and files, loads
with the bytes of one process, also after 2 more steps, and what is saved here loads in one process:
each kind from every third row, and with LOWBIT_WHOLE=1 from all.

    LOWBIT_RECORD=1 python -m pytest tests/sharding/matrix/test_matrix_kinds.py    # kinds.json
"""

import os

import pytest

from tests.sharding.matrix import run
from tests.sharding.matrix.page import same_as_recorded

pytestmark = pytest.mark.long

RECORD = os.environ.get("LOWBIT_RECORD") == "1"


def test_every_kind_of_checkpoint(pool):
    same_as_recorded("kinds", run.kinds(pool), RECORD)
