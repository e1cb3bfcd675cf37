"""One training from data to weights for every optimizer, wrapper and number of ranks."""

import pytest

from tests.gradients import exact_worker
from tests.support.selection import WHOLE

pytestmark = pytest.mark.product

OPTIMIZERS = ("AdamW", "AdamW 4-bit", "Adafactor", "Muon")
STEPS = 20 if WHOLE else 8
PLACES = [("DDP", 2), ("FSDP1", 3), ("FSDP2", 4), ("HSDP", 4)]
if WHOLE:
    PLACES = [(wrapper, n) for wrapper in ("DDP", "FSDP1", "FSDP2") for n in (1, 2, 3, 4)]
    PLACES += [("FSDP2", 5), ("HSDP", 4), ("group", 3)]


@pytest.fixture(scope="module")
def alone(pool):
    """What one process without a wrapper has, by optimizer."""
    return {name: pool.run(1, exact_worker.train, "none", name, STEPS)[0] for name in OPTIMIZERS}


@pytest.mark.parametrize(
    ("optimizer", "wrapper", "ranks"),
    [
        (optimizer, *place)
        for optimizer in OPTIMIZERS
        for place in PLACES
        if (optimizer, place[0]) != ("Muon", "FSDP1")  # which Muon refuses
    ],
)
def test_every_optimizer(pool, alone, optimizer, wrapper, ranks):
    found = pool.run(ranks, exact_worker.train, wrapper, optimizer, STEPS)
    assert all(one == alone[optimizer] for one in found)
