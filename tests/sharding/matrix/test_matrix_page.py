"""The matrix in docs/bits/sharding-matrix.md is what test_matrix.py, test_matrix_rows.py and
test_matrix_kinds.py found.
"""

import copy

import pytest

import lowbit
from tests.sharding.matrix import page
from tests.sharding.matrix.cases import RULES, TABLES, cases_on
from tests.sharding.matrix.checkpoints import KINDS
from tests.sharding.matrix.page import COLUMNS_OF_KINDS
from tests.sharding.matrix.run import SAME
from tests.support.configured import OPTIMIZERS


def test_the_page_has_the_recorded_matrix():
    assert page.page_with(page.recorded()) == page.read_page(), (
        "write it: LOWBIT_RECORD=1 python -m pytest tests/sharding/matrix"
    )


def test_every_optimizer_is_in_the_matrix():
    """Nothing else tests that shards leave the bits of a new one alone."""
    here = {cls for cls in OPTIMIZERS if cls.__module__.startswith("lowbit.optim.rules.")}
    cases = {cls for cls, _ in RULES.values()} | {lowbit.Muon}  # which MuonWithAdamW has
    assert here <= cases, (
        f"{sorted(cls.__name__ for cls in here - cases)}: add to RULES and to a column in "
        "tests/sharding/matrix/cases.py and page.py, then LOWBIT_RECORD=1 python -m pytest "
        "tests/sharding/matrix"
    )


def test_a_cell_that_changed_is_seen_and_equal_refusals_are_one():
    found = page.recorded()
    changed = copy.deepcopy(found)
    words = "parameter 'a.b' is refused"
    changed["first"]["DDP"]["Schedule-Free"] = words
    changed["first"]["FSDP2"]["Schedule-Free"] = words.replace("a.b", "c.d")
    text = page.matrix(changed)
    assert text != page.matrix(found)
    assert text.count("parameter NAME is refused") == 1


def test_cases_of_one_column_agree():
    found = copy.deepcopy(page.recorded())
    assert found["first"]["DDP"]["Adafactor"] == SAME
    found["first"]["DDP"]["Adafactor"] = "is refused"
    with pytest.raises(AssertionError, match="some of"):
        page.matrix(found)


def test_every_row_has_every_case():
    found = page.recorded()
    for which, (_, wrappers) in TABLES.items():
        if which == "kinds":
            assert [*found[which]] == [*wrappers]
            assert all(said.keys() == KINDS.keys() for said in found[which].values())
            continue
        assert {w: [*map(int, by)] for w, by in found[which].items()} == {
            w: [*n] for w, n in wrappers.items()
        }
        for wrapper, by in found[which].items():
            assert all([*said] == [*cases_on(which, wrapper)] for said in by.values())
    assert sorted(k for kinds in COLUMNS_OF_KINDS.values() for k in kinds) == sorted(KINDS)
