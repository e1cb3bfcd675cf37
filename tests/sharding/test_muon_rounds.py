"""The rounds in which a process group's matrices travel to their owners and back, without ranks."""

import types
import weakref

from lowbit import sharding
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
    rounds = [[types.SimpleNamespace(parts=i, orthogonalize=orthogonalize)] for i in range(3)]
    muon._exchange(None, rounds, False)
    # Those of the next round are on their way.
    assert seen == [(0, [False, True]), (1, [False, False, True]), (2, [False] * 3)]
