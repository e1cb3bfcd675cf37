"""Muon on matrices whose rows lie on several ranks: the bytes of one process, two all-to-alls a
step, and checkpoints for other numbers of ranks.
"""

import itertools
import pathlib

import pytest

from tests.sharding.muon import muon_worker

pytestmark = pytest.mark.slow

WAYS = ("8bit", "float32", "parts", "row", "tensor", "kahan", "normuon")


@pytest.mark.parametrize(
    "kind, ranks",
    [
        ("fsdp2", 2),
        ("fsdp2", 3),
        ("hsdp 2 2", 4),
        ("tp 1 2", 2),
        ("tp 2 2", 4),
        ("ep 2 2", 4),
        ("columns", 2),
        ("columns", 3),
    ],
)
def test_any_number_of_ranks_leaves_the_same_bytes(pool, kind, ranks):
    for way in WAYS:
        assert pool.run(ranks, muon_worker.compare, kind, way) == [[]] * ranks, way


@pytest.mark.parametrize(
    "kind, ranks", [("fsdp2", 2), ("fsdp2", 3), ("hsdp 2 2", 4), ("tp 2 2", 4)]
)
@pytest.mark.parametrize("way", ["8bit", "normuon"])
def test_rounds_leave_the_same_bytes(pool, kind, ranks, way):
    """While the matrices of a round are orthogonalized, the next ones arrive."""
    assert pool.run(ranks, muon_worker.compare, kind, way, 1) == [[]] * ranks


@pytest.mark.parametrize(
    "kind, ranks, agreed, numel, rounds",
    [
        ("fsdp2", 2, 1, 1 << 24, 1),
        ("fsdp2", 2, 1, 1, 4),
        ("fsdp2", 3, 1, 1 << 24, 1),
        ("fsdp2", 3, 1, 20_000, 2),
        ("hsdp 2 2", 4, 2, 1 << 24, 1),
        ("hsdp 2 2", 4, 2, 1, 4),
        ("tp 2 2", 4, 4, 1 << 24, 1),
        ("tp 2 2", 4, 4, 1, 4),
    ],
)
def test_parts_go_to_owners_and_back_in_one_all_to_all_each(
    pool, kind, ranks, agreed, numel, rounds
):
    """All-reduces before them agree on who has gradients, over each group and mesh dimension, and
    on the scales of blocks that columns cut.

    NCCL may hang where collectives of two process groups run at once,
    so those of one finish before the next one's begin.
    """
    found = pool.run(ranks, muon_worker.collectives, kind, numel)
    totals: dict = {}
    for one in found:
        names = [name for name, *_ in one["seen"]]
        exchanges = one["exchanges"]
        assert names == ["all_reduce"] * agreed + ["all_to_all_single"] * 2 * len(exchanges)
        assert all(other == ranks for *_, ranks, running in one["seen"] for other in running)
        by_group = [
            (members, [size for _, size, *_ in several])
            for members, several in itertools.groupby(one["seen"][agreed:], key=lambda one: one[2])
        ]
        assert len(by_group) == len({tuple(e["ranks"]) for e in exchanges})
        for members, sent in by_group:
            # Each but the first leaves before the one before it comes back.
            there, back = [sent[0], *sent[1:-1:2]], [*sent[2:-1:2], sent[-1]]
            of_group = [e for e in exchanges if e["ranks"] == members]
            assert there == [e["has"] for e in of_group]
            assert back == [e["owns"] for e in of_group]
        of_one = {tuple(e["ranks"]): 0 for e in exchanges}
        for e in exchanges:
            number = of_one[tuple(e["ranks"])]
            of_one[tuple(e["ranks"])] += 1
            total = totals.setdefault(
                (tuple(e["ranks"]), number), {**e, "has": 0, "owns": 0, "seen": 0}
            )
            assert e["costs"] == total["costs"]
            for key, more in (("has", e["has"]), ("owns", e["owns"]), ("seen", 1)):
                total[key] += more
        assert max(of_one.values()) == rounds
    # A batch is exchanged by its own ranks.
    assert len({members for members, _ in totals}) == (3 if kind.startswith("tp") else 1)
    costs: dict = {}
    for (members, _), total in totals.items():
        assert total["seen"] == len(members)
        assert total["has"] == total["bytes"]
        assert total["owns"] == total["replicas"] * total["bytes"]
        costs.setdefault(members, []).extend(total["costs"])
    for members, owned in costs.items():
        loads = [
            sum(cost for owner, cost in owned if owner == rank) for rank in range(len(members))
        ]
        assert max(loads) <= sum(loads) / len(members) + max(cost for _, cost in owned)


@pytest.mark.parametrize(
    "first, then", [("fsdp2", "fsdp2"), ("columns", "columns"), ("columns", "fsdp2")]
)
def test_a_checkpoint_of_three_ranks_goes_on_on_two(pool, first, then):
    folder = pathlib.Path(pool.folder) / f"muon {first} {then}"
    before = pool.run(3, muon_worker.saved, first, folder)
    after = pool.run(2, muon_worker.loaded, then, folder)
    assert all(one == before[0] for one in (*before, *after))


def test_columns_of_a_batch_go_to_the_ranks_with_its_state(pool):
    """Gradients in float32 to them, results in bfloat16 back;
    both before the other matrices' all-to-alls.
    """
    for one in pool.run(2, muon_worker.collectives, "columns"):
        sent = [size for name, size, *_ in one["seen"] if name == "all_to_all_single"]
        numel = 4 * 24 * 40
        assert len(sent) == 4 and sent[:2] == [4 * numel // 2, 2 * numel // 2]


def test_steps_in_the_backward_pass_have_the_same_bits(pool):
    assert pool.run(2, muon_worker.in_backward) == [[], []]


def test_momentum_of_torch_loads_into_cut_batches(pool):
    assert pool.run(2, muon_worker.loaded_momentum) == [[], []]


def test_a_mesh_of_some_ranks_has_a_group_of_its_own(pool):
    assert pool.run(5, muon_worker.of_some_ranks) == [[]] * 5


@pytest.mark.parametrize(
    "kind, ranks", [("fsdp2", 3), ("hsdp 2 2", 4), ("tp 2 2", 4), ("columns", 2)]
)
def test_clipping_and_scaled_gradients_have_the_same_bits(pool, kind, ranks):
    assert pool.run(ranks, muon_worker.surrounded, kind) == [[]] * ranks


@pytest.mark.parametrize("early, micro", [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_tensor_parallel_training_has_the_same_bits(pool, early, micro):
    """A step after the backward pass or in it, of one micro-batch or several."""
    assert pool.run(4, muon_worker.trained, early, micro) == [[]] * 4


def test_refusals(pool):
    found = pool.run(4, muon_worker.refused)[0]
    assert "Muon takes dimension 2 alone or with dimension 0" in found["columns of a batch"]
    assert "inside a byte of 4-bit codes" in found["bytes"]
    assert found["replicas"] == "nothing was refused"
