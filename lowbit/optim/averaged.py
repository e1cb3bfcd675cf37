"""What an average of weights is made of: each parameter with its average,
and the operator call of each device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import ops, sharding
from lowbit.config.overrides import clean_name
from lowbit.state.layout import Layout, check_stream, layout_of, stream_of
from lowbit.state.plan import plan_tensor


@dataclass(frozen=True)
class Averaged:
    """A parameter and its average."""

    name: str
    p: Tensor
    average: Tensor
    lay: Layout
    stream: int


@dataclass
class DeviceGroup:
    """The parameters of one device, as the operator takes them."""

    device: torch.device
    members: list[Averaged] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    plan: Tensor | None = None
    updates: int = 0  # that the steps have counted

    def update(self, hyper: list[float], seed: int, updates: int) -> None:
        """Moves the averages toward the weights, after so many other updates."""
        if self.updates != updates:  # loaded
            for step in self.steps:
                step.fill_(updates)
        if self.plan is None:
            self.plan = plan_tensor([each.lay.plan_row(each.stream) for each in self.members])
        weights = [sharding.local(each.p).detach().contiguous() for each in self.members]
        for each, weight in zip(self.members, weights, strict=True):
            if weight.device != self.device:
                raise RuntimeError(
                    f"parameter {each.name!r} is on {weight.device} now, and its average on "
                    f"{self.device}: move the model first, then build the EMA"
                )
        ops.step(
            "sgd",
            self.averages,
            weights,
            [],
            self.steps,
            self.plan,
            hyper,
            maximize=True,
            seed=seed,
        )
        self.updates = updates + 1


def version(p: Tensor) -> int:
    value = sharding.local(p)
    return 0 if value.is_inference() else value._version


def by_device(members: Iterable[Averaged]) -> list[DeviceGroup]:
    groups: dict[torch.device, DeviceGroup] = {}
    for each in members:
        average = sharding.local(each.average)
        group = groups.setdefault(average.device, DeviceGroup(average.device))
        where = average.device if average.is_cuda else "cpu"
        group.members.append(each)
        group.averages.append(average)
        group.steps.append(torch.zeros((), dtype=torch.float32, device=where))
    return list(groups.values())


def averaged(params: Any, dtype: torch.dtype, state_format: str) -> list[Averaged]:
    """What is averaged, each average beginning as its weight, rounded to nearest."""
    made: list[Averaged] = []
    streams: dict[int, tuple[str, Any]] = {}
    options = {"state_format": "float32", "param_format": state_format, "full_precision": ()}
    names = set()
    for index, (name, p) in enumerate(_named(params)):
        _check_param(name, p, isinstance(params, nn.Module))
        if name in names:
            raise ValueError(
                f"two parameters are named {name!r}, without the prefixes of wrappers; give each a "
                "name of its own"
            )
        names.add(name)
        part = sharding.part(p, f"parameter {name!r}")
        value = (
            sharding.local(p).detach().to(dtype, memory_format=torch.contiguous_format, copy=True)
        )
        average = sharding.like(p, value, part.shape)
        lay = layout_of("sgd", options, average, name, index, (None,))
        # Others than those that an optimizer rounds the weight with in the same step: the two would
        # be correlated.
        stream = stream_of(f"ema.{name}", index)
        check_stream(stream, name, p, streams, set())
        made.append(Averaged(name, p, average, lay, stream))
    if not made:
        raise ValueError("there is no parameter that requires a gradient, so nothing to average")
    return made


def _named(params: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        sharding.reshard(params)
        found: Iterable[Any] = params.named_parameters()
    elif isinstance(params, Iterable) and not isinstance(params, (Tensor, str, Mapping)):
        found = params
    else:
        raise TypeError(f"EMA takes the model or its parameters, not {type(params).__name__}")
    for number, each in enumerate(found):
        name, p = each if isinstance(each, tuple) else (str(number), each)
        if not isinstance(p, Tensor):
            raise TypeError(
                f"EMA takes the model or its parameters, not {type(p).__name__} in a list"
            )
        if p.requires_grad:
            yield clean_name(name), p


def _check_param(name: str, p: Tensor, of_model: bool) -> None:
    if sharding.is_flat(p):
        raise ValueError(
            f"parameter {name!r} is a flat shard of FSDP1 (FullyShardedDataParallel), which hides "
            "its shape and its placement; EMA takes plain parameters and those of fully_shard: "
            "shard with fully_shard, or keep the average of a copy of the model that is not wrapped"
        )
    if hasattr(p, "ds_tensor"):
        raise ValueError(
            f"parameter {name!r} is partitioned by DeepSpeed's ZeRO-3, which leaves an empty "
            "tensor instead of it; take stage 1 or 2, or fully_shard"
        )
    if p.is_meta:
        raise ValueError(
            f"parameter {name!r} is on the meta device; build the EMA when weights exist"
        )
    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"parameter {name!r} is {str(p.dtype).removeprefix('torch.')}, which is not averaged; "
            "pass the parameters that are float32, bfloat16 or float16"
        )
    if sharding.is_sharded(p) and not of_model:
        raise ValueError(
            f"parameter {name!r} is a DTensor: pass the model instead of its parameters, so that "
            "copies that fully_shard has gathered are given up when "
            "weights and averages change places"
        )
