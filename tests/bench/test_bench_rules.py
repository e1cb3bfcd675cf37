"""The table of rules and formats: what is read of the program's lines, and what its ratios mean.
No timing is tested.
"""

import json

import pytest

from bench.speed import rules

LINES = "\n".join(
    [
        "avx2\trules\tadamw\t10.00\t2.000\t2.000\t2.500\t2.500",
        "avx2\trules\tcame\t15.00\t6.000\t2.000\t1e30\t1e30",
    ]
)


def test_a_ratio_is_for_the_same_number_of_bytes():
    rows = rules.measured(LINES)
    assert rules.ratio(rows[0], "cache", 10.0) == 1.0
    assert rules.ratio(rows[1], "cache", 10.0) == pytest.approx(6 / 2 * 10 / 15)


def test_a_place_that_was_not_measured_has_no_column():
    text = rules.tables(rules.measured(LINES))
    assert "| came | 15.00 | 6.00 (2.00) |" in text and "memory" not in text
    assert "AVX2, memory" in rules.tables(rules.measured(LINES.splitlines()[0]))


COUNTED = "\n".join(
    [
        "avx2\trules\tadamw\t10.00\t150.0\t120.0\t1.00\t1.00",
        "avx2\trules\tlion\t8.00\t100.0\t80.0\t0.00\t0.00",
        "avx2\tformats\tlog8\t10.00\t300.0\t240.0\t1.00\t1.00",
    ]
)


def test_what_is_above_the_line_is_listed_with_its_counts():
    text = rules.counts_table(rules.counted(COUNTED))
    assert "| log8 | 10.00 | 300 | 240 (2.00) | 1.0, 1.0 |" in text
    assert "| adamw | 10.00 | 150 | 120 (1.00) |" in text
    assert "lion" not in text
    assert "| lion | 8.00 | 100 |" in rules.counts_table(
        rules.counted(COUNTED), {("rules", "lion")}
    )


def test_what_took_longer_is_above_the_line():
    assert rules.above(rules.measured(LINES)) == {("rules", "came")}


def test_least_cycles_stand_beside_times():
    text = rules.tables(rules.measured(LINES), rules.counted(COUNTED))
    # 120 instructions, four in a cycle, of 8 values
    assert "| adamw | 10.00 | 2.00 (1.00) | 3.8 |" in text
    assert "| came | 15.00 | 6.00 (2.00) |  |" in text


def test_the_page_is_that_of_the_recorded_results():
    result = json.loads(rules.RESULT.read_text())
    assert rules.PAGE.read_text() == rules.written(result, rules.recorded_counts())
