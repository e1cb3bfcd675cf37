"""Kinds of checkpoints under each wrapper: the last table of docs/bits/sharding-matrix.md.

A cell is "same bits" if what a row above saved, by the same kind of state dict and files, loads
with the bytes of one process, also after 2 more steps, and what is saved here loads in one process:
each kind from every third row. In CI the ways to write and read take turns in the rows; with
LOWBIT_WHOLE=1 every row has every kind, and one process loads all.

    LOWBIT_RECORD=1 python -m pytest tests/sharding/matrix/test_matrix_kinds.py    # kinds.json
"""

import os

import pytest

from tests.sharding.matrix import run
from tests.sharding.matrix.cases import OVER_KINDS
from tests.sharding.matrix.checkpoints import KINDS, kinds_of
from tests.sharding.matrix.page import same_as_recorded

pytestmark = pytest.mark.long

RECORD = os.environ.get("LOWBIT_RECORD") == "1"


def test_every_kind_of_checkpoint(pool):
    same_as_recorded("kinds", run.kinds(pool), RECORD)


def test_every_pair_is_run():
    """Each wrapper with each state dict and with each way to write files, and each of the first
    with each of the second.
    """
    rows = {row: kinds_of(number) for number, row in enumerate(OVER_KINDS, 1)}
    every = {KINDS[kind] for kind in KINDS}
    assert {KINDS[kind] for kinds in rows.values() for kind in kinds} == every
    for row, kinds in rows.items():
        had = [KINDS[kind] for kind in kinds]
        for part in (0, 1):
            assert {each[part] for each in had} == {each[part] for each in every}, row
