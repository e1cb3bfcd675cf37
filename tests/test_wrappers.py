"""Whatever is wrapped around the model: weights and state are the bytes of a single process from the same global gradients, and checkpoints cross.

Prints the table: `pytest -s tests/test_wrappers.py`. A cell is 10 steps, equal; then 10 more from what another wrapper saved, equal again: for every
format from the wrapper before (a ring), and for 8bit from every other one.
"""

import pytest
import wrappers_worker
from pool import Pool
from wrappers_worker import FORMATS, WRAPPERS

NAMES = list(WRAPPERS)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def single(pool):
    """Digests of one process after 10 and after 20 steps."""
    return [
        pool.run(1, "wrappers_worker", "train", "single", list(FORMATS), pool.folder.name, steps)[0]
        for steps in (20, 10)  # what the latter saves is loaded
    ][::-1]


def different(got, want):
    """The parameters that are not equal, or are missing."""
    return sorted(name for name in want.keys() | got.keys() if got.get(name) != want.get(name))


@pytest.fixture(scope="module")
def trained(pool, single):
    """(wrapper, format) -> the parameters that are not equal after 10 steps; a checkpoint of each is in the pool's folder."""
    made = {("single", name): [] for name in FORMATS}
    for wrapper in NAMES[1:]:
        found = pool.run(
            WRAPPERS[wrapper], "wrappers_worker", "train", wrapper, list(FORMATS), pool.folder.name
        )
        assert all(other == found[0] for other in found)
        made.update({(wrapper, name): different(found[0][name], single[0][name]) for name in FORMATS})  # fmt: skip
    return made


def test_the_same_bytes_under_every_wrapper(pool, single, trained):
    rows, wrong = [], {cell: names for cell, names in trained.items() if names}
    for i, wrapper in enumerate(NAMES):
        sources = [(name, NAMES[i - 1]) for name in FORMATS]
        sources += [("8bit", source) for source in NAMES if source not in (NAMES[i - 1], wrapper)]
        found = pool.run(WRAPPERS[wrapper], "wrappers_worker", "resume", wrapper, sources, pool.folder.name)[0]  # fmt: skip
        cells = []
        for name in FORMATS:
            loads = [(key, different(found[key], single[1][name])) for key in sources if key[0] == name]  # fmt: skip
            wrong.update({(wrapper, *key): names for key, names in loads if names})
            good = not trained[wrapper, name] and not any(names for _, names in loads)
            cells.append(f"equal, {len(loads)} loads" if good else "DIFFERENT")
        rows.append([f"{wrapper} ({WRAPPERS[wrapper]})", *cells])
    print()
    for row in [["wrapper (ranks)", *FORMATS], *rows]:
        print("  ".join(cell.ljust(22 if i == 0 else 15) for i, cell in enumerate(row)).rstrip())
    for what, message in wrappers_worker.REFUSED_BY_TORCH.items():
        print(f"torch refuses {what}: {message}")
    assert not wrong


@pytest.mark.parametrize("wrapper", ["FSDP1 orig", "FSDP1 flat", "TP x FSDP 2x2 row"])
def test_more_formats(pool, wrapper):
    """10 steps equal, and 10 more from what a single process saved."""
    names, folder, ranks = list(wrappers_worker.MORE), pool.folder.name, WRAPPERS[wrapper]
    after20, after10 = (
        pool.run(1, "wrappers_worker", "train", "single", names, folder, steps)[0]
        for steps in (20, 10)
    )
    found = pool.run(ranks, "wrappers_worker", "train", wrapper, names, folder)[0]
    assert {name: different(found[name], after10[name]) for name in names} == {
        name: [] for name in names
    }
    jobs = [(name, "single") for name in names]
    found = pool.run(ranks, "wrappers_worker", "resume", wrapper, jobs, folder)[0]
    assert {name: different(found[name, "single"], after20[name]) for name in names} == {name: [] for name in names}  # fmt: skip


@pytest.mark.parametrize("what", wrappers_worker.REFUSED_BY_TORCH)
def test_what_torch_refuses(pool, what):
    message = pool.run(2, "wrappers_worker", "refused_by_torch", what)[0]
    assert wrappers_worker.REFUSED_BY_TORCH[what] in message


def test_a_different_gradient_is_seen(pool, single):
    """The comparison itself can fail."""
    found = pool.run(2, "wrappers_worker", "off_by_one_gradient")[0]
    assert different(found, single[0]["8bit"]) == ["a.square"]


# Real training: every rank has the same batch, so a mean over 2 or 4 ranks is the gradient of one process, bit for bit.


@pytest.mark.parametrize(
    "wrapper, ranks",
    [
        ("DDP", 2), ("DDP bucket views, static graph", 2), ("DDP no_sync", 2), ("ZeroRedundancyOptimizer", 2), ("FSDP1 orig", 4), ("FSDP1 flat", 4),
        ("FSDP1 orig, mixed precision", 2), ("FSDP1 flat, mixed precision", 2), ("FSDP1 orig, no shard", 2),
        ("FSDP1 orig, hybrid", 4), ("FSDP1 flat, hybrid", 4), ("FSDP2", 4), ("FSDP2, mixed precision", 2), ("HSDP 2x2", 4),
    ],
)  # fmt: skip
def test_real_training(pool, wrapper, ranks):
    plain = "mixed" if "mixed" in wrapper else "no_sync" if "no_sync" in wrapper else "plain"
    want = pool.run(1, "wrappers_worker", "real", plain)[0]
    for found in pool.run(ranks, "wrappers_worker", "real", wrapper):
        assert different(found, want) == []


# FSDP1


@pytest.mark.parametrize("wrapper", ["FSDP1 orig", "FSDP1 flat"])
@pytest.mark.parametrize("kind", ["full", "sharded", "own"])
def test_the_float32_view_round_trips(pool, single, wrapper, kind):
    """Codes and scales come back from the moments that torch's own functions gather, and training goes on with the same bytes.

    Not where torch gives both moments one buffer, which it does with its own AdamW too.
    """
    name = "8bit"
    for found in pool.run(
        WRAPPERS[wrapper], "wrappers_worker", "float32_view", wrapper, name, kind
    ):
        if found["excused"]:
            assert kind == "full" and wrapper == "FSDP1 orig"
            assert all(pool.run(WRAPPERS[wrapper], "wrappers_worker", "torch_adamw_aliases"))
            continue
        assert found["same state"]
        assert different(found["continued"], single[1][name]) == []


@pytest.mark.parametrize("wrapper", ["FSDP1 orig", "FSDP1 flat"])
def test_checkpoints_are_read_directly(pool, single, wrapper):
    folder = pool.folder.name
    assert all(pool.run(WRAPPERS[wrapper], "wrappers_worker", "read_directly", wrapper, folder))


@pytest.mark.parametrize("wrapper", ["FSDP1 orig", "FSDP1 flat"])
def test_a_step_that_is_called_off_counts_nowhere(pool, wrapper):
    assert all(pool.run(WRAPPERS[wrapper], "wrappers_worker", "infinite_gradients", wrapper))


def test_the_float32_view_is_a_state_dict_of_torch_adamw(pool):
    assert pool.run(2, "wrappers_worker", "torch_adamw_takes_it")[0]


def test_unbound_flat_shards_are_refused_with_one_message(pool):
    for messages in pool.run(2, "wrappers_worker", "unbound"):
        for message in messages:
            assert "flat shard of FSDP1" in message and "lowbit.fsdp1.bind(model, opt)" in message


def test_what_bind_refuses(pool):
    for found in pool.run(2, "wrappers_worker", "bind_refuses"):
        assert "not in the model that was given" in found["another model"]
        assert "cannot show 'exp_avg_sq_row'" in found["factored"] or "variance_row" in found["factored"]  # fmt: skip
        assert "needs whole rows" in found["APOLLO"]


# Placements


def test_a_cut_inside_a_byte_is_refused_with_the_numbers(pool):
    for message in pool.run(2, "wrappers_worker", "cut_inside_a_byte"):
        assert "of 77 columns is cut at columns 39, inside a byte of 4-bit codes" in message


def test_columns_cut_inside_blocks_load_other_formats(pool):
    """A float32 checkpoint is encoded on loading where blocks are cut, as one process encodes it."""
    assert all(pool.run(3, "wrappers_worker", "recode_columns"))
