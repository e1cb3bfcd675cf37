"""Ten steps of Muon leave the same bytes on every mesh,
with every instruction set and number of threads.
"""

import pathlib

import pytest

import lowbit
from tests.sharding.muon import muon_worker

pytestmark = pytest.mark.long

SETTINGS = [(isa, threads) for isa in lowbit.catalog()["isas"] for threads in (1, 2)]
MESHES = [
    ("ddp", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("fsdp2", 4),
    ("hsdp 1 2", 2),
    ("hsdp 3 1", 3),
    ("hsdp 2 2", 4),
    ("tp 1 1", 1),
    ("tp 1 2", 2),
    ("tp 2 1", 2),
    ("tp 1 3", 3),
    ("tp 3 1", 3),
    ("tp 2 2", 4),
]


@pytest.fixture(scope="module")
def alone(pool):
    """The file of what one process has; with every setting it has the same."""
    file = pathlib.Path(pool.folder) / "grid.pt"
    assert pool.run(1, muon_worker.grid, "one", file, SETTINGS) == [[]]
    return file


@pytest.mark.parametrize("kind, ranks", MESHES)
def test_every_mesh_leaves_the_bytes_of_one_process(pool, alone, kind, ranks):
    """One process has all settings, meshes have them in turn."""
    setting = SETTINGS[-1 - MESHES.index((kind, ranks)) % len(SETTINGS)]
    assert pool.run(ranks, muon_worker.grid, kind, alone, [setting]) == [[]] * ranks
