"""torchtitan's mixture of experts on gloo, by its own parallel styles, for frameworks_worker.py: experts over 2 ranks, FSDP2 over the rest."""

from __future__ import annotations

import functools
import pathlib
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from torch import nn
from torch.distributed.fsdp import fully_shard

HALF, ALL = 3, 6
EXPERTS, WIDTH, HIDDEN, SHARED = 8, 32, 48, 2


class Model(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings, self.moe = nn.Embedding(50, WIDTH), moe

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.moe(self.tok_embeddings(ids))


def mixture() -> tuple[nn.Module, nn.Module]:
    """A model around torchtitan's MoE, sharded; and its experts."""
    # Kernels of a dispatcher for GPUs, which need triton to be imported.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep", mock.MagicMock())
    import spmd_types as spmd
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models.common import config_utils, moe_sharding

    init = functools.partial(nn.init.normal_, std=0.05)
    router = config_utils.make_router_config(
        dim=WIDTH, num_experts=EXPERTS, gate_param_init={"weight": init}, top_k=2
    )
    weights = ("w1_EFD", "w2_EDF", "w3_EFD")
    routed = config_utils.make_routed_experts_config(
        dim=WIDTH, hidden_dim=HIDDEN, num_experts=EXPERTS, top_k=2,
        param_init=dict.fromkeys(weights, init), comm_backend="standard",
    )  # fmt: skip
    config = config_utils.make_moe_config(
        num_experts=EXPERTS, router=router, routed_experts=routed, load_balance_coeff=None
    )
    moe_sharding.set_moe_sharding_config(
        config, enable_ep=True, enable_sp=False,
        expert_param_layout={name: spmd.S(2 if name == "w2_EDF" else 1) for name in weights},
    )  # fmt: skip
    ranks = dist.get_world_size()
    with mock.patch.object(
        parallel_dims, "device_type", "cpu"
    ):  # a build of CUDA's torch says cuda
        utils.set_spmd_backend("partial_dtensor")
        dims = ParallelDims(
            dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=SHARED, world_size=ranks, spmd_backend="partial_dtensor"
        )  # fmt: skip
        dims.build_mesh()
        moe = config.build()
        for p in moe.parameters():
            init(p)
        model = Model(moe)
        moe.parallelize(dims)
        experts = moe.routed_experts.inner_experts
        efsdp = dims.get_optional_mesh(["efsdp"])
        if efsdp is not None:
            fully_shard(experts, mesh=efsdp)
            experts.set_gradient_divide_factor(ranks)
            experts.set_force_sum_reduction_for_comms(True)
        fully_shard(model, mesh=dims.get_mesh(["fsdp"]))
    return model, experts


def train(folder: pathlib.Path, resume: bool) -> dict[str, dict[str, str]]:
    from torchtitan.components.checkpointer.dcp import ModelWrapper

    from lowbit.integrations import torchtitan

    torch.manual_seed(int(resume))
    model, experts = mixture()
    container = torchtitan.adamw(lr=1e-2, seed=3, min_numel=1024).build(model_parts=[model])
    (opt,) = container.optimizers
    for p in experts.parameters():
        assert "exp_avg_dynamic8" in opt.state[p]
        assert opt.state[p]["exp_avg_dynamic8"].placements == p.placements
    out, begin = {}, 0
    states = {"model": ModelWrapper([model]), "optimizer": container}
    if resume:
        dcp.load(states, checkpoint_id=folder)
        out["loaded"], begin = digest(opt, HALF), HALF
    for step in range(begin, ALL):
        if step == HALF and not resume:
            dcp.save(states, checkpoint_id=folder)
            out["saved"] = digest(opt, HALF)
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        ids = torch.randint(50, (4, 8), generator=generator)
        (model(ids) - 1.0).square().mean().backward()
        container.step()
        container.zero_grad()
    out["end"] = digest(opt, ALL)
    return out
