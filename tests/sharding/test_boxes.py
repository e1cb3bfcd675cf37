"""Process groups of matrices that a mesh cuts both ways, in a job of more ranks than the mesh."""

import pytest
import torch

import lowbit

pytestmark = pytest.mark.slow


def with_a_group_that_some_ranks_have():
    """Muon's step on the mesh of a pipeline's first stage, after ranks 0 and 1 have got a process
    group of their own; the weight, as every rank of the mesh has it.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    found = None
    if dist.get_rank() < 4:
        torch.manual_seed(0)
        weight, grad = torch.randn(64, 64), torch.randn(64, 64)
        cuts = [Shard(0), Shard(1)]
        p = torch.nn.Parameter(distribute_tensor(weight, mesh, cuts))
        opt = lowbit.Muon([("w", p)], lr=1e-2)
        p.grad = distribute_tensor(grad, mesh, cuts)
        opt.step()
        alone = torch.nn.Parameter(weight)
        other = lowbit.Muon([("w", alone)], lr=1e-2)
        alone.grad = grad
        other.step()
        found = torch.equal(p.full_tensor(), alone)
    return found


def test_ranks_with_different_numbers_of_groups_find_each_other(pool):
    found = pool.run(5, with_a_group_that_some_ranks_have)
    assert found == [True] * 4 + [None]
