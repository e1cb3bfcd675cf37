"""The matrix of docs/bits/sharding-matrix.md: every rule and format under every wrapper, trained,
saved and loaded, beside one process.

A cell is "same bits" if 10 steps give the bytes of one process, and what the wrapper of the line
above saved loads, with the bytes of one process, also after 2 more steps; the first line loads what
one process saved, and one process what the last one saved. Else it has the refusal. One case of
each column runs on more ranks too, which load what fewer saved, and one process what they saved.
`tests/sharding/matrix/first.json` is what this test found, and the page is written from it:

    LOWBIT_RECORD=1 python -m pytest tests/sharding/matrix/test_matrix.py    # writes both

CI runs its pairs: test_matrix_pairs.py.
"""

import os

import pytest

from tests.sharding.matrix import worker
from tests.sharding.matrix.page import OF_EACH_COLUMN, same_as_recorded
from tests.sharding.matrix.run import SAME

pytestmark = pytest.mark.whole

RECORD = os.environ.get("LOWBIT_RECORD") == "1"


def joined(several):
    """What any rank found not to be equal, by case."""
    return {
        name: sorted({each for found in several for each in found[name]}) for name in several[0]
    }


def one_of(several):
    """The refusals of all ranks, which agree on what is refused."""
    assert all(said.keys() == several[0].keys() for said in several), several
    return several[0]


@pytest.fixture(scope="module")
def found(pool):
    """Wrapper -> case -> "same bits" or the words of the refusal."""
    folder = pool.folder

    def run(wrapper, function, *arguments, ranks=None):
        ranks = ranks or worker.WRAPPERS.get(wrapper, 1)
        return pool.run(ranks, function, wrapper, *arguments)

    said, wrong = {}, {}

    def train(wrapper, names, name, ranks=None):
        answers = run(wrapper, worker.train, names, folder, name, ranks=ranks)
        said[name] = one_of([refused for refused, _ in answers])
        wrong[name] = joined([each for _, each in answers])

    everyone = ["single", *worker.WRAPPERS]
    for wrapper in everyone:
        train(wrapper, [*worker.CASES], wrapper)
    assert not said["single"] and list(wrong["single"]) == list(worker.CASES)
    for before, wrapper in zip([everyone[-1], *everyone], everyone, strict=False):
        # what the wrapper before refuses comes from one process
        sources = {before: [], "single": []}
        for name in wrong[wrapper]:
            sources[before if name in wrong[before] else "single"].append(name)
        sources = {source: names for source, names in sources.items() if names}
        for name, found in joined(run(wrapper, worker.resume, sources, folder)).items():
            wrong[wrapper][name] += found
    on_more = {}  # name of what is saved -> cases
    for wrapper, counts in worker.MORE_RANKS.items():
        before = wrapper
        for ranks in counts:
            more = f"{wrapper} on {ranks} ranks"
            train(wrapper, OF_EACH_COLUMN, more, ranks)
            refused = {
                name: words for name, words in said[wrapper].items() if name in OF_EACH_COLUMN
            }
            assert said[more] == refused, more
            on_more[more] = [*wrong[more]]
            resumed = run(wrapper, worker.resume, {before: on_more[more]}, folder, ranks=ranks)
            for name, found in joined(resumed).items():
                wrong[more][name] += found
            before = more
    for name, found in joined(run("single", worker.resume, on_more, folder)).items():
        wrong["single"][name] += found
    bad = {w: {k: v for k, v in by.items() if v} for w, by in wrong.items() if any(by.values())}
    assert not bad, bad
    return {
        wrapper: {name: said[wrapper].get(name, SAME) for name in worker.CASES}
        for wrapper in worker.WRAPPERS
    }


def test_every_cell_is_what_was_recorded(found):
    same_as_recorded("first", found, RECORD)


def test_a_difference_is_seen(pool):
    assert pool.run(1, worker.nothing_loaded)[0]
