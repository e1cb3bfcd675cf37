"""The matrix in docs/sharding.md is what test_matrix.py found."""

import matrix_page
import pytest
from matrix_cases import TABLES
from matrix_page import SAME


def test_the_page_has_the_recorded_matrix():
    assert matrix_page.page_with(*matrix_page.recorded()) == matrix_page.read_page(), (
        "write it: LOWBIT_RECORD=1 python -m pytest tests/sharding/test_matrix.py tests/sharding/test_matrix_rows.py"
    )


def test_a_cell_that_changed_is_seen_and_equal_refusals_are_one():
    found, more = matrix_page.recorded()
    first, second = list(found)[:2]
    words = "parameter 'a.b' is refused"
    changed = {wrapper: {**cells, "LAMB": SAME} for wrapper, cells in found.items()}
    changed[first] = {**changed[first], "LAMB": words}
    changed[second] = {**changed[second], "LAMB": words.replace("a.b", "c.d")}
    text = matrix_page.matrix(changed, more)
    assert text != matrix_page.matrix(found, more)
    assert text.count("parameter NAME is refused") == 1


def test_cases_of_one_column_agree():
    found, more = matrix_page.recorded()
    first = next(iter(found))
    assert found[first]["Adafactor"] == SAME
    with pytest.raises(AssertionError, match="some of"):
        matrix_page.matrix({**found, first: {**found[first], "Adafactor": "is refused"}}, more)


def test_every_row_has_every_case():
    _, more = matrix_page.recorded()
    for which, (cases, wrappers) in TABLES.items():
        assert which == "wrappers" and [*more] == [*wrappers]
        assert all([*by] == [str(n) for n in wrappers[wrapper]] for wrapper, by in more.items())
        assert all(said.keys() == cases.keys() for by in more.values() for said in by.values())
