"""The same bits for any number of ranks, any sharding and any instruction set, in real processes
over gloo; checkpoints cross between them.
"""

import pytest
import torch
from torch import nn

import lowbit
from tests.sharding import distributed_worker
from tests.support.trained import losses_of_both_modes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def single():
    return distributed_worker.run_bits("single", 1)


def test_every_isa_gives_the_same_bits(single):
    for dtype in ("torch.bfloat16", "torch.float32"):
        digests = {
            name: digest
            for name, digest in single.items()
            if name.startswith(dtype) and "scalar" in name
        }
        assert len(digests) == len(lowbit.catalog()["isas"]) and len(set(digests.values())) == 1


@pytest.mark.parametrize("mode, ranks", [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)])
def test_every_sharding_gives_the_same_bits(pool, single, mode, ranks):
    for got in pool.run(ranks, distributed_worker.run_bits, mode, ranks):
        assert got == {name: single[name] for name in got}
    print(f"{mode} on {ranks} ranks: {len(got)} digests equal those of one process")


@pytest.mark.usefixtures("ckpt")
def test_checkpoints_cross_between_shardings(pool, tmp_path):
    def run(ranks, save=False):
        found = pool.run(ranks, distributed_worker.run_checkpoint, "fsdp", ranks, tmp_path, save)
        assert all(one == found[0] for one in found)
        return found[0]

    first = run(2, save=True)
    assert len(set(first.values())) == 2, (
        "nested, flattened and asynchronous saves hold the same state"
    )
    assert distributed_worker.run_checkpoint("plain", 1, tmp_path, save=False) == first
    assert run(3) == run(2) == first


def test_parameters_of_other_ranks_are_refused_by_name(pool):
    for rank, said in enumerate(pool.run(3, distributed_worker.other_ranks)):
        there, name = ([2], "last") if rank < 2 else ([0, 1], "first")
        lies = f"lies on a mesh of ranks {there}, and rank {rank} is not one of them: leave it out"
        for placement in ("cut", "whole"):
            assert said[f"AdamW, {placement}"].startswith(f"parameter '{name}' {lies}")
            assert said[f"Muon, {placement}"].startswith(f"parameter '{name}' {lies}")
            assert said[f"own, {placement}"] == "stepped"
        assert said["clipped, cut"].startswith("stepped" if rank < 2 else f"a parameter {lies}")


# What one rank shows; more wrappers are in test_wrappers.py.


def test_modes_give_up_what_an_evaluation_gathered(one_rank):
    """FSDP2 keeps the root's gathered weights after a pass without a backward pass: the next one
    trained at the average."""
    from torch.distributed.fsdp import fully_shard

    def losses(shard):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
        if shard:
            fully_shard(model[0], mesh=one_rank)
            fully_shard(model, mesh=one_rank)
        opt = lowbit.ScheduleFreeAdamW(model.named_parameters(), lr=0.05)
        return losses_of_both_modes(model, opt)

    assert losses(True) == losses(False)


def test_an_average_of_another_shape_is_refused(one_rank):
    """A row that was broadcast over all rows was no average of this model."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    model = fully_shard(nn.Linear(32, 64, dtype=torch.bfloat16), mesh=one_rank)
    ema = lowbit.EMA(model)
    row = distribute_tensor(torch.ones(1, 32, dtype=torch.bfloat16), one_rank, [Shard(0)])
    saved = {"average_bfloat16": {**ema.averages, "weight": row}, "n_averaged": 1}
    before = ema.averages["weight"].full_tensor().clone()
    with pytest.raises(ValueError, match=r"the average of 'weight' has the shape \(1, 32\)"):
        ema.load_state_dict(saved)
    assert torch.equal(ema.averages["weight"].full_tensor(), before) and ema.n_averaged == 0


def test_dtensors_on_one_rank(one_rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    value, grad = torch.randn(64, 512), torch.randn(64, 512)
    results = []
    for placement in (None, Shard(0), Shard(1), Replicate()):
        p = nn.Parameter(
            value.clone() if placement is None else distribute_tensor(value, one_rank, [placement])
        )
        opt = lowbit.AdamW([("w", p)])
        p.grad = grad if placement is None else distribute_tensor(grad, one_rank, [placement])
        opt.step()
        full = [
            t if placement is None else t.full_tensor()
            for t in (p.detach(), opt.state[p]["exp_avg_dynamic8_scale"])
        ]
        results.append(full)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
