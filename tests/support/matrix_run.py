"""The tables of the matrix as test_matrix_rows.py finds them: which ranks do what, in which order, and what they found in common."""

from __future__ import annotations

from collections import defaultdict

from matrix_cases import TABLES, cases_on
from matrix_rows_worker import ONE
from pool import Pool

SAME = "same bits"
Words = dict[str, str]  # case or kind -> SAME or a refusal


def of_all(answers: list[tuple[Words, dict[str, list[str]]]]) -> tuple[Words, dict[str, set[str]]]:
    """The refusals, which ranks agree on, and the differences that any of them found."""
    wrong: dict[str, set[str]] = defaultdict(set)
    for said, found in answers:
        assert said.keys() == answers[0][0].keys(), [list(said) for said, _ in answers]
        for name, each in found.items():
            wrong[name] |= set(each)
    return answers[0][0], wrong


def table(pool: Pool, which: str) -> dict[str, dict[str, Words]]:
    """Wrapper -> number of ranks -> case -> SAME, the words of the refusal, or the words of one process where it refuses the case itself."""
    folder = pool.folder
    not_alone: Words = pool.run(1, "matrix_rows_worker", "one_process", which, folder)[0]
    before, not_before = ONE, list(not_alone)
    found: dict[str, dict[str, Words]] = {}
    bad, last = {}, {}
    for wrapper, counts in TABLES[which][1].items():
        found[wrapper] = {}
        for ranks in counts:
            place = (wrapper, ranks)
            answers = pool.run(ranks, "matrix_rows_worker", "cells", which, folder, place, before, list(not_alone), not_before)  # fmt: skip
            said, wrong = of_all(answers)
            bad |= {(*place, name): sorted(each) for name, each in wrong.items() if each}
            cases = cases_on(which, *place)
            found[wrapper][str(ranks)] = {name: {**not_alone, **said}.get(name, SAME) for name in cases}  # fmt: skip
            served = [name for name in cases if found[wrapper][str(ranks)][name] == SAME]
            before, not_before = place, [name for name in TABLES[which][0] if name not in served]
            if ranks == counts[0]:
                last[place] = served
    wrong = pool.run(1, "matrix_rows_worker", "in_one_process", which, folder, last)[0]
    bad |= {("in one process", name): each for name, each in wrong.items() if each}
    assert not bad, bad
    return found
