"""Muon on matrices whose rows lie on several ranks: the bytes of one process, two all-to-alls a step, and checkpoints for other numbers of ranks."""

import pathlib

import pytest

WAYS = ("8bit", "float32", "parts", "row", "tensor", "kahan")


@pytest.mark.parametrize("kind, ranks", [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)])
def test_any_number_of_ranks_leaves_the_same_bytes(pool, kind, ranks):
    for way in WAYS:
        assert pool.run(ranks, "muon_worker", "compare", kind, way) == [[]] * ranks, way


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_go_to_owners_and_back_in_one_all_to_all_each(pool, ranks):
    """And one all-reduce, by which ranks agree on who has gradients."""
    found = pool.run(ranks, "muon_worker", "collectives", "fsdp2")
    for one in found:
        assert [name for name, _ in one["seen"]] == ["all_reduce", *["all_to_all_single"] * 2]
        assert [sent for _, sent in one["seen"][1:]] == [one["has"], one["owns"]]
    assert sum(one["has"] for one in found) == sum(one["owns"] for one in found)
    costs = found[0]["costs"]
    loads = [sum(cost for owner, cost in costs if owner == rank) for rank in range(ranks)]
    assert max(loads) <= sum(loads) / ranks + max(cost for _, cost in costs)
    assert all(one["costs"] == costs for one in found)


def test_a_checkpoint_of_three_ranks_goes_on_on_two(pool):
    folder = pathlib.Path(pool.folder) / "muon"
    before = pool.run(3, "muon_worker", "saved", folder)
    after = pool.run(2, "muon_worker", "loaded", folder)
    assert all(one == before[0] for one in (*before, *after))


def test_steps_in_the_backward_pass_have_the_same_bits(pool):
    assert pool.run(2, "muon_worker", "in_backward") == [[], []]


def test_refusals(pool):
    found = pool.run(4, "muon_worker", "refused")[0]
    assert "sharded on dimension 1; Muon takes matrices whose rows are sharded" in found["columns"]
    assert "sharded on dimension 1" in found["batch"]
    assert "has rows that 2 mesh dimensions shard" in found["twice"]
    assert found["replicas"] == "nothing was refused"
