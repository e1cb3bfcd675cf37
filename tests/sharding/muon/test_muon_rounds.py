"""The rounds in which a process group's matrices travel to their owners and back, without ranks."""

import collections
import itertools
import types
import weakref

import pytest

from lowbit import sharding
from lowbit.state.muon_layout import MuonLayout
from lowbit.step import muon


class Arrived:
    """What waits for the parts of a round."""

    def __init__(self, whole):
        self.whole = whole

    def __call__(self):
        return self.whole


def test_buffers_of_a_round_are_gone_when_its_products_run(monkeypatch):
    waiting, seen = [], []

    def to_owners(group, parts):
        arrived = Arrived({0: (parts[0], None)})
        waiting.append(weakref.ref(arrived))
        return arrived

    def orthogonalize(number, rows):
        seen.append((number, [ref() is not None for ref in waiting]))

    monkeypatch.setattr(sharding, "to_owners", to_owners)
    monkeypatch.setattr(sharding, "from_owners", lambda group, parts, whole: lambda: None)
    rounds = [[types.SimpleNamespace(traveling=i, orthogonalize=orthogonalize)] for i in range(3)]
    muon._exchange(None, rounds, False)
    # Those of the next round are on their way.
    assert seen == [(0, [False, True]), (1, [False, False, True]), (2, [False] * 3)]


def spread(ranks, shapes):
    """Matrices and batches of them, with owners as an optimizer chooses them."""
    parts = [sharding.Part(shape, shape, (0,) * len(shape)) for shape in shapes]
    layouts = [
        MuonLayout("muon", part, (), "float32", 0, pieces=part.shape[-2:-1]) for part in parts
    ]
    found = iter(sharding.owners([lay.cost for lay in layouts for _ in range(lay.count)], ranks))
    return [
        types.SimpleNamespace(lay=lay, owners=tuple(itertools.islice(found, lay.count)))
        for lay in layouts
    ]


def time_of(rounds, ranks):
    """When the last owner ends. Parts of a round leave after those that return from the round
    before the last one.
    """
    ends, before = [0.0] * ranks, [0.0] * ranks
    for several in rounds:
        costs = collections.Counter()
        for one in several:
            for owner in one.owners:
                costs[owner] += one.lay.cost
        arrived, before = max(before), ends
        ends = [max(end, arrived) + costs[rank] for rank, end in enumerate(ends)]
    return max(ends)


@pytest.mark.parametrize(
    "ranks, count, rounds",
    [
        (8, 8, 1),
        (64, 64, 1),
        (256, 128, 1),
        (64, 128, 2),
        (8, 24, 3),
        (8, 32, 4),
        (8, 128, 4),
        (1, 4, 4),
    ],
)
def test_rounds_of_equal_matrices_take_the_time_of_one(ranks, count, rounds):
    matrices = spread(ranks, [(4096, 4096)] * count)
    made = muon._rounds(matrices)
    assert len(made) == rounds
    assert time_of(made, ranks) == time_of([matrices], ranks)


@pytest.mark.parametrize("ranks", [8, 64, 192])
def test_rounds_of_several_sizes_take_hardly_more(ranks):
    layer = [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        (11008, 4096),
        (11008, 4096),
        (4096, 11008),
    ]
    matrices = spread(ranks, layer * 32)
    made = muon._rounds(matrices)
    assert len(made) > 1
    assert sorted(map(id, itertools.chain(*made))) == sorted(map(id, matrices))
    assert time_of(made, ranks) <= 1.05 * time_of([matrices], ranks)


def test_rounds_count_the_matrices_of_a_batch_that_are_here():
    part = sharding.Part((64, 2048, 1024), (1, 2048, 1024), (5, 0, 0))
    lay = MuonLayout("muon", part, (), "float32", 0, pieces=(2048,))
    matrices = [types.SimpleNamespace(lay=lay, owners=(i % 2,)) for i in range(4)]
    assert muon._rounds(matrices) == [matrices]
