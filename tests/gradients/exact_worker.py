"""What a rank does in test_exact.py: training from data to weights,
with exact means of gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import lowbit
from lowbit import fsdp1
from tests.support.digests import digest

MICRO = 12
OPTIMIZERS = {
    "AdamW": lambda p: lowbit.AdamW(p, lr=1e-2, min_numel=256),
    "AdamW 4-bit": lambda p: lowbit.AdamW(p, lr=1e-2, min_numel=256, state_format="4bit"),
    "Adafactor": lambda p: lowbit.Adafactor(p, lr=1e-2),
    "Muon": lambda p: lowbit.MuonWithAdamW(groups_of_muon(p), lr=1e-2),
}


def groups_of_muon(named):
    """Matrices of blocks by Muon, the rest by AdamW."""
    return [
        {
            "params": [
                (n, p) for n, p in named if ("up.weight" in n or "down.weight" in n) == muon
            ],
            "use_muon": muon,
        }
        for muon in (True, False)
    ]


class Block(nn.Module):
    """Rows of 48 and 37, which no number of ranks cuts evenly; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 37), nn.Linear(37, 48, bias=False)
        self.norm, self.drop = nn.LayerNorm(48), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(48, 61, bias=False)
        self.head.weight = self.embed.weight
        self.tiny = nn.Parameter(torch.ones(3))  # empty shards
        self.frozen = nn.Parameter(torch.ones(48), requires_grad=False)
        self.often = nn.Linear(48, 48)  # DDP alone: a micro-batch may leave it out
        self.reach = False

    def forward(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        x = self.embed(ids) * self.frozen
        for block in self.blocks:
            x = block(x)
        if not self.reach or index % 3 == 0:
            x = x + self.often(x)
        return self.head(x * self.tiny.sum())


def wrapped(wrapper: str, dtype: torch.dtype) -> nn.Module:
    model = Net().to(dtype)
    mixed = "mixed" in wrapper
    if wrapper.startswith("DDP"):
        unused = "unused" in wrapper
        model.reach = unused
        return nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=unused, bucket_cap_mb=0.01
        )
    if wrapper.startswith("FSDP1"):
        options: dict = {"use_orig_params": "flat" not in wrapper, "device_id": torch.device("cpu")}
        if "no shard" in wrapper:
            options["sharding_strategy"] = ShardingStrategy.NO_SHARD
        if mixed:
            options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
        model.blocks[0] = FullyShardedDataParallel(model.blocks[0], **options)
        if "flat" in wrapper:
            options["ignored_states"] = [model.frozen]
        return FullyShardedDataParallel(model, **options)
    if wrapper.startswith(("FSDP2", "HSDP")):
        ranks = dist.get_world_size()
        shape = (2, ranks // 2) if wrapper.startswith("HSDP") else (ranks,)
        options = {
            "mesh": init_device_mesh(
                "cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :]
            )
        }
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
        if "offload" in wrapper:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    if "unused" in wrapper:
        model.reach = True
    if mixed:
        model = Mixed(model)
    return model


class Mixed(nn.Module):
    """One process's mixed precision: float32 parameters, computed with in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        cast = {n: p.bfloat16() for n, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, cast, (ids, index))


def batch(step: int, index: int) -> torch.Tensor:
    """Micro-batches of different lengths."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, 61, (2, 5 + index), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor, index: int) -> torch.Tensor:
    return F.cross_entropy(model(ids, index).float().flatten(0, 1), ids.roll(1, 1).flatten())


def train(
    wrapper: str,
    optimizer: str = "AdamW",
    steps: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    order: str = "dealt",
    released: bool = False,
    ranks_per_node: int | None = None,
) -> tuple[dict[str, str], list[float]]:
    """Digests of weights and state, and the losses. order: "dealt",
    "reversed" or "one by one" (unequal counts). Of a wrapper "group", ranks hold bare models.
    """
    model = wrapped(wrapper, dtype)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    opt = OPTIMIZERS[optimizer](named)
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt)
    group = dist.group.WORLD if wrapper.startswith("group") else None
    accumulator = lowbit.accumulate(
        model,
        rounding="exact",
        average=MICRO,
        seed=7,
        group=group,
        ranks_per_node=ranks_per_node,
    )
    if released:
        lowbit.step_in_backward(model, opt)
    losses = []
    for step in range(steps):
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled="scaled" in wrapper)
        for index in dealt(accumulator, order):
            drawn = torch.random.get_rng_state()
            with accumulator.micro(index=index):
                loss = loss_of(model, batch(step, index or 0), index or 0)
                scale.scale(loss).backward()
                accumulator.log(loss)
            assert torch.equal(drawn, torch.random.get_rng_state())
        if "scaled" in wrapper:
            scale.unscale_(opt)
        if not released:
            lowbit.clip_grad_norm_([p for _, p in named if p.grad is not None], 0.5)
        scale.step(opt)
        scale.update()
        opt.zero_grad()
        losses.append(accumulator.loss())
    return named_digest(opt, steps), losses


def dealt(accumulator, order: str) -> list[int | None]:
    if order == "reversed":
        return accumulator.indices()[::-1]
    return accumulator.indices()


def named_digest(opt, steps: int) -> dict[str, str]:
    return {name.replace("module.", ""): value for name, value in digest(opt, steps).items()}


def torch_train(wrapper: str, steps: int = 3) -> dict[str, str]:
    """The same with torch's own reduction and accumulation."""
    model = wrapped(wrapper, torch.bfloat16)
    opt = OPTIMIZERS["AdamW"]([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        for index in range(rank, MICRO, ranks):
            torch.manual_seed(100 * step + index)
            (loss_of(model, batch(step, index), index) * (ranks / MICRO)).backward()
        opt.step()
        opt.zero_grad()
    return named_digest(opt, steps)


def counted(wrapper: str, ranks_per_node: int | None = None) -> dict[str, dict[str, int]]:
    """Collectives, and the bytes that this rank hands to them,
    of a micro-batch and of the last one.
    """
    model = wrapped(wrapper, torch.bfloat16)
    accumulator = lowbit.accumulate(
        model,
        rounding="exact",
        average=3 * dist.get_world_size(),
        ranks_per_node=ranks_per_node,
    )
    found = {}
    for turn in ("first", "more", "last"):
        sent: dict[str, int] = {}
        with Counted(sent), accumulator.micro():
            loss_of(model, batch(0, 3), 3).backward()
        found[turn] = sent
    found["parameters"] = {"": sum(p.numel() for p in Net().parameters() if p.requires_grad)}
    return found


class Counted:
    """The collectives of lowbit's exchanges."""

    def __init__(self, sent: dict[str, int]) -> None:
        self.sent = sent
        self.before = dist.all_to_all_single, dist.all_gather_into_tensor

    def __enter__(self) -> None:
        exchange, gather = self.before

        def all_to_all(arrived, rows, *splits, group=None):
            self.add("exchange", rows)
            return exchange(arrived, rows, *splits, group=group)

        def all_gather(joined, mine, group=None):
            self.add("gather", mine)
            return gather(joined, mine, group=group)

        dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, all_gather

    def add(self, name: str, t: torch.Tensor) -> None:
        self.sent[name] = self.sent.get(name, 0) + t.numel() * t.element_size()
        self.sent[name + "s"] = self.sent.get(name + "s", 0) + 1

    def __exit__(self, *_) -> None:
        dist.all_to_all_single, dist.all_gather_into_tensor = self.before


def twice() -> str:
    """Both ranks take micro-batch 0."""
    model = wrapped("DDP", torch.bfloat16)
    accumulator = lowbit.accumulate(model, rounding="exact", average=2)
    try:
        with accumulator.micro(index=0):
            loss_of(model, batch(0, 0), 0).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def halves() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Two stages of a pipeline, and the micro-batches of a step."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(24, 40), nn.GELU()).bfloat16()
    second = nn.Linear(40, 24, bias=False).bfloat16()
    return first, second, torch.randn(MICRO, 4, 24).bfloat16()


def square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).float().square().mean()


def gradients(module: nn.Module) -> list[list[float]]:
    return [p.grad.float().flatten().tolist() for p in module.parameters()]


def whole() -> list[list[list[float]]]:
    """Gradients of both halves in one process."""
    first, second, x = halves()
    model = nn.Sequential(first, second)
    accumulator = lowbit.accumulate(model, rounding="exact", average=MICRO)
    for one in x:
        with accumulator.micro():
            square(model(one), one).backward()
    return [gradients(first), gradients(second)]


def staged() -> tuple[int, list[list[float]]]:
    """The stage of this rank, of two with two replicas each, and its gradients."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "stages"))
    stage, copy = mesh.get_local_rank("stages"), mesh.get_local_rank("copies")
    first, second, x = halves()
    module = (first, second)[stage]
    accumulator = lowbit.accumulate(
        module, rounding="exact", average=MICRO, group=mesh.get_group("copies")
    )
    place = PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    mine = x[copy::2].flatten(0, 1)
    with accumulator.micro(last=True, passes=MICRO // 2):
        schedule = Schedule1F1B(place, MICRO // 2, loss_fn=square)
        schedule.step(mine) if stage == 0 else schedule.step(target=mine)
    return stage, gradients(module)


def uneven_nodes() -> str:
    model = wrapped("FSDP2", torch.bfloat16)
    accumulator = lowbit.accumulate(model, rounding="exact", average=3, ranks_per_node=2)
    return said(lambda: one_pass(model, accumulator))


def grouped(wrapper: str) -> str:
    model = wrapped(wrapper, torch.bfloat16)
    return said(
        lambda: lowbit.accumulate(model, rounding="exact", average=2, group=dist.group.WORLD)
    )


class OfRank(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + dist.get_rank())


class OfPasses(nn.Module):
    """An output that depends on earlier passes, on rank 1 alone."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += dist.get_rank()
        return x * (1 + self.passes)


def reproducible(wrapper: str) -> str:
    """What `check_reproducible` says of a model in a wrapper, or of one that asks for its rank or
    counts its passes.
    """
    torch.manual_seed(0)
    if wrapper == "the passes of a rank":
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), OfPasses())
        return str(lowbit.check_reproducible(model, lambda: model(torch.ones(2, 4)).sum()))
    if wrapper == "a rank's own noise":
        model = nn.Sequential(nn.Linear(4, 4), OfRank(), nn.Linear(4, 4))
        return str(lowbit.check_reproducible(model, lambda: model(torch.ones(2, 4)).sum()))
    model = wrapped(wrapper, torch.bfloat16)
    return str(lowbit.check_reproducible(model, lambda: loss_of(model, batch(0, 3), 3)))


def mishaps() -> dict[str, str]:
    """What was said where gradients would have been lost, by what was done; on two ranks."""
    return {name: said(case) for name, case in MISHAPS.items()}


def said(case) -> str:
    try:
        return str(case())
    except Exception as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"


def one_pass(model: nn.Module, accumulator, **options) -> None:
    with accumulator.micro(**options):
        loss_of(model, batch(0, 3), 3).backward()


def exact(wrapper: str, average: int = 2):
    model = wrapped(wrapper, torch.bfloat16)
    return model, lowbit.accumulate(model, rounding="exact", average=average)


def no_sync(wrapper: str) -> None:
    model, accumulator = exact(wrapper)
    with model.no_sync():
        one_pass(model, accumulator)


def unsynchronized() -> None:
    model, accumulator = exact("FSDP2")
    model.set_requires_gradient_sync(False)
    one_pass(model, accumulator)


def unfrozen() -> None:
    model, accumulator = exact("FSDP2")
    model.frozen.requires_grad_(True)
    one_pass(model, accumulator)


def frozen_since() -> None:
    model, accumulator = exact("FSDP2")
    model.tiny.requires_grad_(False)
    one_pass(model, accumulator)


def partly() -> None:
    model = Net().bfloat16()
    fully_shard(model.blocks[0])
    lowbit.accumulate(model, rounding="exact", average=2)


def twice_in_one(wrapper: str) -> None:
    model, accumulator = exact(wrapper, 4)
    with accumulator.micro(last=True):
        loss_of(model, batch(0, 3), 3).backward()
        loss_of(model, batch(0, 4), 4).backward()


def idle_only(wrapper: str) -> float:
    """One micro-batch on two ranks."""
    model, accumulator = exact(wrapper, 1)
    for index in accumulator.indices():
        with accumulator.micro(index=index):
            loss = loss_of(model, batch(0, index or 0), index or 0)
            loss.backward()
            accumulator.log(loss)
    return accumulator.loss()


def restored(together: bool) -> str:
    """Gradients by torch's own reduction after `remove`."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([model[0], model[1]] if together else model[0])
    fully_shard(model)
    lowbit.accumulate(model, rounding="exact", average=2).remove()
    model(torch.ones(2, 8)).sum().backward()
    assert all(p.grad.full_tensor().any() for p in model.parameters())
    return "restored"


def modules_of_fsdp1() -> str:
    model, _ = exact("FSDP1")
    model.eval().train()
    repr(model)
    return f"{len(model.state_dict())} entries"


MISHAPS = {
    "DDP no_sync": lambda: no_sync("DDP"),
    "FSDP1 no_sync": lambda: no_sync("FSDP1"),
    "FSDP2 no sync": unsynchronized,
    "unfrozen": unfrozen,
    "frozen since": frozen_since,
    "partly": partly,
    "DDP twice": lambda: twice_in_one("DDP"),
    "FSDP1 twice": lambda: twice_in_one("FSDP1"),
    "DDP one micro-batch": lambda: idle_only("DDP"),
    "FSDP2 one micro-batch": lambda: idle_only("FSDP2"),
    "FSDP1 one micro-batch": lambda: idle_only("FSDP1"),
    "removed": lambda: restored(False),
    "removed, together": lambda: restored(True),
    "FSDP1 modules": modules_of_fsdp1,
}
