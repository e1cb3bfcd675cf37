"""What a rank does in test_recover.py: passes that raise on every rank,
and the step that is run again.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lowbit
from tests.support.wrap import shared_mesh

PLACES = ("forward", "loss", "between blocks", "inside of a block")
MICRO = 2
RULES: dict[str, Any] = {
    "": lowbit.AdamW,
    "LAMB": lowbit.LAMB,
    "Adafactor": functools.partial(lowbit.Adafactor, beta1=0.9),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=4, update_proj_gap=2),
    "split8": functools.partial(lowbit.AdamW, state_format="4bit", param_format="bfloat16_split8"),
}


class Boom(Exception):
    pass


class Trap(torch.autograd.Function):
    armed = ""  # the place whose backward pass raises

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: str) -> torch.Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if Trap.armed == ctx.place:
            raise Boom
        return grad, None


class Block(nn.Module):
    def __init__(self, traps: bool) -> None:
        super().__init__()
        self.up, self.down, self.traps = nn.Linear(32, 64), nn.Linear(64, 32), traps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(x))
        return x + self.down(Trap.apply(y, "inside of a block") if self.traps else y)


class Experts(nn.Module):
    """Four experts that all see every token, each where its rank has it;
    they replace a block.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        values = torch.randn(4, 32, 32, dtype=torch.bfloat16) / 16
        self.w = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, tokens = x.shape, x.reshape(-1, x.shape[-1])
        everyone = all_gather_tensor_autograd(tokens, 0, self.group)
        y = Trap.apply(
            torch.einsum("td,ehd->teh", everyone, self.w.to_local()), "inside of a block"
        )  # type: ignore[attr-defined]
        mine = reduce_scatter_tensor_autograd(F.gelu(y).sum(1), "sum", 0, self.group)
        return x + mine.reshape(shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList([Block(False), Block(True), Block(False)])
        self.head = nn.Linear(32, 40)
        self.bfloat16()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = Trap.apply(x, "between blocks")
                if Trap.armed == "forward":
                    raise Boom
        return self.head(x).float()


def meshed(kind: str) -> nn.Module:
    """A model on two mesh dimensions of two ranks each."""
    model, other = Net(), kind[:2].lower()
    mesh = shared_mesh((2, 2), ("fsdp", other))
    over = mesh["fsdp"]
    if kind == "tp x fsdp":
        model.ranks_of_a_batch = 2
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
    else:  # experts over two ranks, all else over four
        model.blocks[1] = Experts(mesh["ep"])
        fully_shard(model.blocks[1], mesh=mesh["fsdp"])
        over = mesh._flatten("all")
    for block in model.blocks:
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=over)
    return fully_shard(model, mesh=over)


def build(kind: str) -> tuple[nn.Module, Any]:
    kind, _, rule = kind.partition(", ")
    model: nn.Module = Net()
    if kind in ("tp x fsdp", "ep x fsdp"):
        model = meshed(kind)
    elif kind in ("fsdp2", "hsdp"):
        ranks = torch.distributed.get_world_size()
        shape = {"fsdp": ranks} if kind == "fsdp2" else {"copies": 2, "fsdp": ranks // 2}
        mesh = shared_mesh(tuple(shape.values()), tuple(shape))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        options: dict[str, dict[str, Any]] = {
            "ddp": {"bucket_cap_mb": 0.005},
            "ddp view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
            "ddp unused": {"find_unused_parameters": True},
            "ddp static": {"static_graph": True},
        }
        model = DistributedDataParallel(model, **options[kind])
    return model, RULES[rule](lowbit.param_groups(model), lr=1e-2, min_numel=64)


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    seed = 100 * i + torch.distributed.get_rank() // getattr(model, "ranks_of_a_batch", 1)
    tokens = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    if Trap.armed == "loss":
        raise Boom
    return loss


@contextlib.contextmanager
def armed(place: str):
    Trap.armed = place
    try:
        yield
    finally:
        Trap.armed = ""


def contents(model: nn.Module, opt: Any) -> list[torch.Tensor]:
    kept = [t for p in model.parameters() for t in (p.detach(), *opt.state[p].values())]
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in kept]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def accumulated(kind: str, accidents: dict[int, int], place: str) -> list[Any]:
    """Weights and state after some steps. `accidents`: in which steps, and in which micro-batch of
    each, a pass raises first at this place.
    """
    model, opt = build(kind)
    accumulator = lowbit.accumulate(model, average=MICRO)
    if kind == "ddp static":  # its first pass cannot go unreduced
        with accumulator.micro(last=True):
            loss_of(model, 999).backward()
        opt.zero_grad()

    def step(s: int, raises: int | None = None) -> None:
        for i in range(MICRO):
            with accumulator.micro(last=i == MICRO - 1), armed(place if i == raises else ""):
                loss_of(model, MICRO * s + i).backward()

    for s in range(3):
        if s in accidents:
            try:
                step(s, accidents[s])
            except Boom:
                opt.zero_grad()
            else:
                raise AssertionError("nothing was raised")
        step(s)
        opt.step()
        opt.zero_grad()
    return contents(model, opt)


# Both micro-batches, of the first step and of the next, behind which one more shows what is left.
EACH = ({0: 0, 1: 1}, {0: 1, 1: 0})
BOTH = EACH[:1]


def run_again(
    kind: str,
    every: tuple[dict[int, int], ...] = EACH,
    places: tuple[str, ...] = PLACES,
) -> dict[str, bool]:
    want = accumulated(kind, {}, "")
    return {
        f"{kind}, {place}, micro-batches by step {accidents}": same(
            accumulated(kind, accidents, place), want
        )
        for place in places
        for accidents in every
    }


def in_backward(kind: str) -> dict[str, bool]:
    """Steps in backward continue behind a pass that raised; under DDP, which steps behind the
    reducer, with the bits of a run without it.
    """

    def run(place: str) -> tuple[nn.Module, list[torch.Tensor]]:
        model, opt = build(kind)
        released = lowbit.step_in_backward(model, opt)
        for s in range(4):
            if place and s == 2:
                try:
                    with armed(place):
                        loss_of(model, s).backward()
                except Boom:
                    released.reset()
                    opt.zero_grad()
                else:
                    raise AssertionError("nothing was raised")
            loss_of(model, s).backward()
            opt.step()
        return model, contents(model, opt)

    want, found = run("")[1], {}
    for place in PLACES:
        model, got = run(place)
        name = f"{kind}, in backward, {place}"
        if kind == "fsdp2":
            found[f"{name}, sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
        if kind != "fsdp2" or place in ("forward", "loss"):  # what was stepped stays so
            found[name] = same(got, want)
    return found


def fsdp1(original: bool, ours: bool) -> dict[str, bool]:
    """Whether a step under FSDP1 that is run again after a pass that raised has the same bits, by
    the place; with lowbit's AdamW or torch's.
    """

    def run(place: str) -> list[torch.Tensor]:
        model = FullyShardedDataParallel(
            Net(), use_orig_params=original, device_id=torch.device("cpu")
        )
        opt: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if ours:
            opt = lowbit.AdamW(model.named_parameters(), lr=1e-2, min_numel=64)
            lowbit.fsdp1.bind(model, opt)
        for s in range(3):
            if place and s == 1:
                try:
                    with armed(place):
                        loss_of(model, s).backward()
                except Boom:
                    opt.zero_grad()
            loss_of(model, s).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    want = run("")
    return {place: same(run(place), want) for place in PLACES}


def first_static_pass() -> str:
    """What is said of a static graph whose first pass raised, on which torch cannot continue."""
    model, _ = build("ddp static")
    accumulator = lowbit.accumulate(model)
    for place in ("between blocks", ""):
        try:
            with accumulator.micro(last=True), armed(place):
                loss_of(model, 0).backward()
        except Boom:
            continue
        except RuntimeError as error:
            return str(error)
    return ""


def without_reset() -> str:
    """What is said under FSDP2 of a torch that cannot bring it back."""
    model, _ = build("fsdp2")
    accumulator = lowbit.accumulate(model)
    method = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        for place in ("between blocks", ""):
            with accumulator.micro(last=True), armed(place):
                loss_of(model, 0).backward()
    except Boom:
        try:
            with accumulator.micro(last=True):
                loss_of(model, 0).backward()
        except RuntimeError as error:
            return str(error)
    finally:
        FSDPModule.reset_iter_state = method  # type: ignore[method-assign]
    return ""


def collectives(kind: str) -> int:
    """Barriers of a run that raises nothing."""
    with mock.patch.object(torch.distributed, "barrier", wraps=torch.distributed.barrier) as calls:
        accumulated(kind, {}, "")
    return calls.call_count
