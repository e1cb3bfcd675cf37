"""The average of weights has the bits of one process under every wrapper, and its checkpoint
crosses between numbers of ranks.
"""

import pytest
import torch

from tests.sharding import ema_worker

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "mode, ranks",
    [
        ("ddp", 2),
        ("replicate", 2),
        ("fsdp", 2),
        ("fsdp", 3),
        ("fsdp", 4),
        ("hsdp", 4),
        ("tp", 4),
        ("offload", 2),
        ("meshes", 4),
    ],
)
def test_every_sharding_gives_the_same_bits(pool, mode, ranks, dtype):
    found = pool.run(ranks, ema_worker.run, mode, ranks, dtype)
    assert all(one == found[0] for one in found)
    want = ema_worker.run("single tp" if mode == "tp" else "single", 1, dtype)
    assert found[0] == want


def test_composable_ddp_is_not_taken_for_fsdp2(pool):
    assert pool.run(2, ema_worker.composable_ddp) == [False, False]


def test_a_checkpoint_of_three_ranks_loads_on_two_and_on_one(pool, tmp_path):
    def run(mode, ranks, save=False):
        if ranks == 1:
            return ema_worker.checkpoint(mode, 1, tmp_path / "ema", save)
        found = pool.run(ranks, ema_worker.checkpoint, mode, ranks, tmp_path / "ema", save)
        assert all(one == found[0] for one in found)
        return found[0]

    saved = run("fsdp", 3, save=True)
    assert run("fsdp", 2) == run("ddp", 2) == run("hsdp", 4) == run("single", 1) == saved


@pytest.mark.parametrize(
    "mode, ranks",
    [
        ("ep", 2),
        ("ep x fsdp", 4),
        ("pipeline", 2),
        ("pipeline x fsdp", 4),
        ("zero", 2),
        ("zero, views", 2),
        ("zero, views, built first", 2),
    ],
)
def test_ranks_that_have_other_parameters_give_the_same_bits(pool, tmp_path, mode, ranks):
    """Experts, pipeline stages, and weights that ZeroRedundancyOptimizer steps;
    a checkpoint goes both ways.
    """
    alone = "single zero" if "zero" in mode else "single"
    want = ema_worker.apart(alone, tmp_path / "alone", "save")
    for folder, act in ((tmp_path / mode, "save"), (tmp_path / "alone", "load")):
        found = pool.run(ranks, ema_worker.apart, mode, folder, act)
        for several, whole in zip(zip(*found, strict=True), want, strict=True):
            together = {name: value for each in several for name, value in each.items()}
            assert together == whole, act
            assert all(each[name] == whole[name] for each in several for name in each)
    assert ema_worker.apart(alone, tmp_path / mode, "load") == want


def test_flat_shards_and_lone_dtensors_are_refused(pool):
    for said in pool.run(2, ema_worker.refused):
        assert len(said) == 3
        assert all("is a flat shard of FSDP1" in message for message in said[:2])
        assert "is a DTensor: pass the model" in said[2]
