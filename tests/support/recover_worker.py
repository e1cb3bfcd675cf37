"""What a rank does in test_recover.py: passes that raise on every rank, and the step that is run again."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lowbit

PLACES = ("forward", "loss", "between blocks", "inside of a block")
MICRO = 2


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


def build(kind: str) -> tuple[nn.Module, Any]:
    model: nn.Module = Net()
    if kind in ("fsdp2", "hsdp"):
        ranks = torch.distributed.get_world_size()
        shape = {"fsdp": ranks} if kind == "fsdp2" else {"copies": 2, "fsdp": ranks // 2}
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
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
    return model, lowbit.AdamW(lowbit.param_groups(model), lr=1e-2, min_numel=64)


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    seed = 100 * i + torch.distributed.get_rank()
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


def accumulated(kind: str, accident: tuple[int, int, str] | None, steps: int = 4) -> list[Any]:
    """Weights and state after some steps; `accident` is in which step, in which of its micro-batches and where a pass raises first."""
    model, opt = build(kind)
    accumulator = lowbit.accumulate(model, average=MICRO)
    if kind == "ddp static":  # its first pass cannot go unreduced
        with accumulator.micro(last=True):
            loss_of(model, 999).backward()
        opt.zero_grad()

    def step(s: int, raises: int | None = None, place: str = "") -> None:
        for i in range(MICRO):
            with accumulator.micro(last=i == MICRO - 1), armed(place if i == raises else ""):
                loss_of(model, MICRO * s + i).backward()

    for s in range(steps):
        if accident is not None and s == accident[0]:
            try:
                step(s, *accident[1:])
            except Boom:
                opt.zero_grad()
            else:
                raise AssertionError("nothing was raised")
        step(s)
        opt.step()
        opt.zero_grad()
    return contents(model, opt)


def run_again(kind: str) -> dict[str, bool]:
    want = accumulated(kind, None)
    found = {}
    for place in PLACES:
        for s in (0, 2):
            for micro in range(MICRO):
                got = accumulated(kind, (s, micro, place))
                found[f"{kind}, step {s}, micro-batch {micro}, {place}"] = same(got, want)
    return found


def in_backward(kind: str) -> dict[str, bool]:
    """Steps in backward go on behind a pass that raised; under DDP, which steps behind the reducer, with the bits of a run without it."""

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


def first_static_pass() -> str:
    """What is said of a static graph whose first pass raised, on which torch cannot go on."""
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
        accumulated(kind, None)
    return calls.call_count
