"""Whatever is wrapped around the model: weights and state are the bytes of a single process from
the same global gradients, and checkpoints cross.

Prints the table: `pytest -s tests/sharding/test_wrappers.py`. A cell compares twice: after some
steps, and 2 steps after loading what other wrappers saved. CI loads every pair of wrappers, and
each format from and to all of them; LOWBIT_WHOLE=1 every format from each. In the column of real
sizes the checkpoint is that of the wrapper in the row above.
"""

import pytest

from tests.sharding import placements_worker, training_worker, wrappers_worker
from tests.sharding.wrappers_worker import FORMATS, REAL, WRAPPERS

pytestmark = pytest.mark.product

NAMES = list(WRAPPERS)
COLUMNS = [*FORMATS, REAL]


def wrong(pool, wrapper, function, *arguments):
    """What any rank found not to be equal: (format, parameter)."""
    found = pool.run(WRAPPERS[wrapper], function, wrapper, *arguments)
    return sorted({each for found_here in found for each in found_here})


def test_the_same_bytes_under_every_wrapper(pool):
    folder = pool.folder
    found = {
        w: [
            each
            for names in ("formats", REAL)
            for each in wrong(pool, w, wrappers_worker.train, names, folder)
        ]
        for w in NAMES
    }
    rows = []
    for i, wrapper in enumerate(NAMES):
        others = [w for w in NAMES if w != wrapper]
        found[wrapper] += wrong(pool, wrapper, wrappers_worker.resume, "formats", others, folder)
        found[wrapper] += wrong(pool, wrapper, wrappers_worker.resume, REAL, [NAMES[i - 1]], folder)
        bad = {name for name, _ in found[wrapper]}
        from_others = wrappers_worker.loads("formats", wrapper, others).values()
        counts = {**{name: sum(name in each for each in from_others) for name in FORMATS}, REAL: 1}
        cells = ["DIFFERENT" if name in bad else f"equal, {counts[name]} loads" for name in COLUMNS]
        rows.append([f"{wrapper} ({WRAPPERS[wrapper]})", *cells])
    print()
    for row in [["wrapper (ranks)", *COLUMNS], *rows]:
        print("  ".join(cell.ljust(22 if i == 0 else 16) for i, cell in enumerate(row)).rstrip())
    for what, message in placements_worker.REFUSED_BY_TORCH.items():
        print(f"torch refuses {what}: {message}")
    assert not any(found.values()), {wrapper: each for wrapper, each in found.items() if each}


def test_every_pair_is_loaded():
    """Of the wrapper that loads, the one that saved, and the format."""
    cells = {
        (wrapper, source, name)
        for wrapper in NAMES
        for source, names in wrappers_worker.loads(
            "formats", wrapper, [w for w in NAMES if w != wrapper]
        ).items()
        for name in names
    }
    wrappers, formats = len(NAMES), len(FORMATS)
    assert len({(to, source) for to, source, _ in cells}) == wrappers * (wrappers - 1)
    assert len({(to, name) for to, _, name in cells}) == wrappers * formats
    assert len({(source, name) for _, source, name in cells}) == wrappers * formats


@pytest.fixture(scope="module")
def more_formats(pool):
    """The folder where a single process saved them."""
    assert wrong(pool, "single", wrappers_worker.train, "more", pool.folder) == []
    return pool.folder


@pytest.mark.parametrize("wrapper", ["FSDP1 orig", "FSDP1 flat", "TP x FSDP 2x2 row"])
def test_more_formats(pool, more_formats, wrapper):
    """Some steps equal, and 2 more from what a single process saved."""
    assert wrong(pool, wrapper, wrappers_worker.train, "more", more_formats) == []
    assert wrong(pool, wrapper, wrappers_worker.resume, "more", ["single"], more_formats) == []


@pytest.mark.parametrize("what", placements_worker.REFUSED_BY_TORCH)
def test_what_torch_refuses(pool, what):
    message = pool.run(2, placements_worker.refused_by_torch, what)[0]
    assert placements_worker.REFUSED_BY_TORCH[what] in message


def test_a_difference_is_seen(pool):
    """The comparison itself can fail."""
    assert pool.run(2, wrappers_worker.off_by_one_gradient) == [["a.square"]] * 2
    every = {f"{unit}.{key}" for unit, shapes in wrappers_worker.UNITS.items() for key in shapes}
    assert all(set(found) == every for found in pool.run(2, wrappers_worker.nothing_loaded))


# Real training: every rank has the same batch,
# so a mean over 2 or 4 ranks is the gradient of one process, bit for bit.


@pytest.mark.parametrize(
    "wrapper, ranks",
    [
        ("DDP", 2),
        ("DDP bucket views, static graph", 2),
        ("DDP no_sync", 2),
        ("ZeroRedundancyOptimizer", 2),
        ("FSDP1 orig", 4),
        ("FSDP1 flat", 4),
        ("FSDP1 orig, mixed precision", 2),
        ("FSDP1 flat, mixed precision", 2),
        ("FSDP1 orig, no shard", 2),
        ("FSDP1 orig, hybrid", 4),
        ("FSDP1 flat, hybrid", 4),
        ("FSDP2", 4),
        ("FSDP2, mixed precision", 2),
        ("HSDP 2x2", 4),
        ("DDP, Schedule-Free", 2),
        ("DDP, cautious", 2),
        ("FSDP2, Schedule-Free", 2),
        ("FSDP2, cautious", 2),
    ],
)
def test_real_training(pool, wrapper, ranks):
    assert pool.run(ranks, training_worker.real, wrapper) == [[]] * ranks


# Placements


def test_what_state_cannot_follow_is_refused_with_the_numbers(pool):
    for said in pool.run(2, placements_worker.refused_placements):
        assert (
            "'w' of 77 columns is cut at columns 39, inside a byte of "
            "4-bit codes; shard it on dimension 0"
        ) in said["a byte"]
        assert said["a byte, wide"] == "nothing was refused"
        for rule in ("APOLLO", "Fira"):
            assert "rank 8 of it needs whole rows; shard it on dimension 0" in said[rule]


def test_columns_cut_inside_blocks_load_other_formats(pool):
    """A float32 checkpoint is encoded on loading where blocks are cut,
    as one process encodes it.
    """
    assert all(pool.run(3, placements_worker.recode_columns))
