"""A mixture of experts under expert parallelism and FSDP2: experts are sharded on one mesh, all
else on another. It resumes under another layout.

    torchrun --nproc-per-node 4 recipes/expert_parallel.py
    torchrun --nproc-per-node 4 recipes/expert_parallel.py --ranks 4
    torchrun --nproc-per-node 1 recipes/expert_parallel.py --ranks 1

In the first run 2 ranks share the experts, and FSDP2 shards over 2 what each of them has. The
second resumes with 4 ranks that share the experts, the third in one process.
"""

import argparse
import gc
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from toy import batch, loss_of, make_model
from train_gpt import Block

import lowbit

STEPS, EXPERTS, PATH = 20, 8, pathlib.Path("out/expert_parallel")


class Exchange(torch.autograd.Function):
    """Rows that ranks send each other. Their gradients travel back."""

    @staticmethod
    def forward(ctx, rows, sent: list[int], received: list[int], group):
        ctx.sizes = (received, sent, group)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.sizes), None, None, None


class Experts(nn.Module):
    """The weights of all experts, [experts, hidden, width] and [experts, width, hidden]."""

    mesh: DeviceMesh | None = None  # of the ranks that share the experts

    def __init__(self, experts: int, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, width, dtype=dtype) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, width, hidden, dtype=dtype) * 0.02)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: tokens, those of the first expert first.
            counts: the number of tokens of each expert.
        """
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if self.mesh is None:
            return self.compute(x, counts.tolist(), up, down)
        group, ranks = self.mesh.get_group(), self.mesh.size()
        theirs = torch.empty_like(counts)  # of each rank, the tokens of every expert here
        dist.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = theirs.view(ranks, -1).sum(1).tolist()
        x = Exchange.apply(x, sent, received, group)
        expert = torch.arange(len(up), device=x.device).repeat(ranks).repeat_interleave(theirs)
        order = expert.argsort(stable=True)  # from by rank to by expert
        y = self.compute(x[order], theirs.view(ranks, -1).sum(0).tolist(), up, down)
        return Exchange.apply(y[order.argsort()], received, sent, group)

    def compute(
        self, x: torch.Tensor, counts: list[int], up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        parts = zip(x.split(counts), up.to(x.dtype), down.to(x.dtype), strict=True)
        return torch.cat([F.linear(F.gelu(F.linear(part, u)), d) for part, u, d in parts])


class Mixture(nn.Module):
    """Each token goes to the one expert that the router prefers."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False, dtype=dtype)
        self.experts = Experts(EXPERTS, width, 4 * width, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = F.linear(tokens, self.router.weight.to(x.dtype)).float().softmax(-1)
        gate, expert = scores.max(-1)
        order = expert.argsort(stable=True)
        y = self.experts(tokens[order], expert.bincount(minlength=EXPERTS))
        return (y[order.argsort()] * gate[:, None].to(y.dtype)).view_as(x)


class MixtureBlock(Block):
    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.mixture = Mixture(width, dtype)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixture(x)


class ExpertParallel(ParallelStyle):
    """Shards a module's parameters on dimension 0, the experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p, device_mesh, [Shard(0)])))
        module.mesh = device_mesh
        return module


def build(shared: int, device: str) -> tuple[nn.Module, lowbit.AdamW]:
    """The model, whose experts `shared` ranks share, and its optimizer."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks // shared, shared), mesh_dim_names=("shard", "expert"))
    everyone = mesh._flatten("data")  # the ranks of both dimensions have different batches
    model = make_model()
    for i in range(len(model.blocks)):
        model.blocks[i] = MixtureBlock(width=64, heads=4, dtype=torch.bfloat16)
    model.to(device, torch.bfloat16)
    for block in model.blocks:
        experts = block.mixture.experts
        parallelize_module(experts, mesh["expert"], ExpertParallel())
        fully_shard(experts, mesh=mesh["shard"])
        # An expert's gradient is a sum over the tokens of all ranks, as every other one.
        experts.set_gradient_divide_factor(ranks)
        experts.set_force_sum_reduction_for_comms(device == "cpu")  # gloo divides by its size only
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    groups = lowbit.param_groups(model)
    return model, lowbit.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def load(
    model: nn.Module, opt: lowbit.AdamW, path: pathlib.Path, options: StateDictOptions | None = None
) -> int:
    """Returns the number of steps that the checkpoint has behind it."""
    weights, state = get_state_dict(model, opt, options=options)
    saved = {"model": weights, "optim": state, "step": torch.tensor(0)}
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(
        model,
        opt,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optim"],
        options=options,
    )
    return int(saved["step"])


def save(
    model: nn.Module,
    opt: lowbit.AdamW,
    step: int,
    path: pathlib.Path,
    options: StateDictOptions | None = None,
) -> None:
    weights, state = get_state_dict(model, opt, options=options)
    # A save that is killed leaves the one that this run resumed from.
    dcp.save(
        {"model": weights, "optim": state, "step": torch.tensor(step)},
        storage_writer=lowbit.checkpoint.Writer(path),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="that share the experts")
    shared = parser.parse_args().ranks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if ranks % shared or EXPERTS % ranks:
        raise SystemExit(
            f"{ranks} ranks: take --ranks that divides them, and ranks that divide {EXPERTS}"
        )
    model, opt = build(shared, device)

    begin = load(model, opt, PATH) if (PATH / ".metadata").exists() else 0
    for step in range(begin, begin + STEPS):
        loss = loss_of(model, batch(step, rank, ranks).to(device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if step % 10 == 0 and rank == 0:
            print(f"step {step}, loss {mean.item():.3f}", flush=True)
    save(model, opt, begin + STEPS, PATH)
    if rank == 0:
        print(f"step {begin + STEPS}, loss {mean.item():.3f}")
        up = model.blocks[0].mixture.experts.up
        print(
            f"experts {tuple(up.shape)} by {up.placements}, its codes by "
            f"{opt.state[up]['exp_avg_dynamic8'].placements}"
        )


if __name__ == "__main__":
    main()
    gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
    dist.destroy_process_group()
