"""The tables of the matrix as test_matrix_pairs.py, test_matrix_rows.py and others find them: which
ranks do what, in which order, and what they found in common.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.sharding.matrix import checkpoints, rows_worker
from tests.sharding.matrix.cases import OVER_KINDS, TABLES, cases_on, refused_under
from tests.sharding.matrix.rows_worker import ONE, Place
from tests.support.ranks.pool import Pool
from tests.support.selection import WHOLE

SAME = "same bits"
Words = dict[str, str]  # case or kind -> SAME or a refusal


def of_all(answers: list[Any]) -> tuple[Words, dict[str, set[str]]]:
    """The refusals, which ranks agree on, and the differences that any of them found."""
    wrong: dict[str, set[str]] = defaultdict(set)
    for said, found, *_ in answers:
        assert said.keys() == answers[0][0].keys(), [list(each[0]) for each in answers]
        for name, each in found.items():
            wrong[name] |= set(each)
    return answers[0][0], wrong


def table(pool: Pool, which: str) -> dict[str, dict[str, Words]]:
    """Wrapper -> number of ranks -> case -> SAME, the words of the refusal, or the words of one
    process where it refuses the case itself. Each place loads what the one before it saved; where
    all places have the same cases, it loads from one process what the one before refused.
    """
    folder = pool.folder
    places = TABLES[which][1]
    loaded = [*cases_on(which, next(iter(places)))]  # by the first place
    not_alone: Words = pool.run(1, rows_worker.one_process, which, folder, loaded)[0]
    before, saved = ONE, [name for name in loaded if name not in not_alone]
    found: dict[str, dict[str, Words]] = {}
    bad, last = {}, {}
    for wrapper, counts in places.items():
        found[wrapper] = {}
        for ranks in counts:
            place, cases = (wrapper, ranks), cases_on(which, wrapper)
            sources = {before: saved}
            if which != "pairs":
                others = [name for name in cases if name not in (*saved, *not_alone)]
                sources.setdefault(ONE, []).extend(others)
            job = (which, folder, place, list(not_alone), sources)
            answers = pool.run(ranks, rows_worker.cells, *job)
            said, wrong = of_all(answers)
            bad |= {(*place, name): sorted(each) for name, each in wrong.items() if each}
            for name in answers[0][2]:  # refused where others saved it: as the rule always is here
                assert name in said or refused_under(wrapper, name), (place, name)
            found[wrapper][str(ranks)] = {
                name: {**not_alone, **said}.get(name, SAME) for name in cases
            }
            served = [name for name in cases if found[wrapper][str(ranks)][name] == SAME]
            before, saved = place, served
            if ranks == counts[0]:
                last[place] = served
    wrong = pool.run(1, rows_worker.in_one_process, which, folder, last)[0]
    bad |= {("in one process", name): each for name, each in wrong.items() if each}
    assert not bad, bad
    return found


def kinds(pool: Pool) -> dict[str, Words]:
    """Wrapper -> kind of checkpoint -> SAME or words, of the kinds that a row has. Each loads what
    was saved above it; one process loads all of it where the product is whole, else each kind from
    every third row.
    """
    folder = pool.folder
    assert not pool.run(1, rows_worker.one_process, "kinds", folder, [])[0]
    found: dict[str, Words] = {}
    sources: dict[str, Place] = {}
    loads: list[tuple[str, Place]] = []
    bad: dict[Any, Any] = {}
    rows = [ONE, *((wrapper, counts[0]) for wrapper, counts in OVER_KINDS.items())]
    for number, place in enumerate(rows):
        # One process saves what the rows begin with, by every kind.
        chosen = [*checkpoints.KINDS] if place == ONE else checkpoints.kinds_of(number)
        answers = pool.run(place[1], checkpoints.kinds, folder, place, chosen, sources)
        said, wrong = of_all(answers)
        bad |= {(*place, kind): sorted(each) for kind, each in wrong.items() if each}
        found[place[0]] = {kind: said.get(kind, SAME) for kind in chosen}
        for kind in chosen:
            if kind not in said:
                sources[kind] = place
                at = number + [*checkpoints.KINDS].index(kind)
                if checkpoints.KINDS[kind][0] and (WHOLE or at % 3 == 0):
                    loads.append((kind, place))
    if wrong := pool.run(1, checkpoints.one_process_loads, folder, loads)[0]:
        bad["in one process"] = wrong
    assert not bad, bad
    del found[ONE[0]]
    return found
