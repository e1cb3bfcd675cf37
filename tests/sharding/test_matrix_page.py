"""The matrix in docs/sharding.md is what test_matrix.py found."""

import matrix_page
import pytest
from matrix_page import SAME


def test_the_page_has_the_recorded_matrix():
    assert matrix_page.page_with(matrix_page.recorded()) == matrix_page.read_page(), (
        "write it: LOWBIT_RECORD=1 python -m pytest tests/sharding/test_matrix.py"
    )


def test_a_cell_that_changed_is_seen_and_equal_refusals_are_one():
    found = matrix_page.recorded()
    first, second = list(found)[:2]
    words = "parameter 'a.b' is refused"
    changed = {wrapper: {**cells, "LAMB": SAME} for wrapper, cells in found.items()}
    changed[first] = {**changed[first], "LAMB": words}
    changed[second] = {**changed[second], "LAMB": words.replace("a.b", "c.d")}
    text = matrix_page.matrix(changed)
    assert text != matrix_page.matrix(found)
    assert text.count("parameter NAME is refused") == 1


def test_cases_of_one_column_agree():
    found = matrix_page.recorded()
    first = next(iter(found))
    assert found[first]["Adafactor"] == SAME
    with pytest.raises(AssertionError, match="some of"):
        matrix_page.matrix({**found, first: {**found[first], "Adafactor": "is refused"}})
