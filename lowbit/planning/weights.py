"""The weights of a model as ranks hold them, before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import sharding
from lowbit.config.overrides import clean_name


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the model; tied ones come once."""

    tensor: Tensor
    parameter: bool
    saved: bool  # whether it is in the model's state dict
    split: bool  # whether ranks hold rows of it; else each holds all
    embedding: bool = False  # whether a nn.Embedding has it

    @property
    def values(self) -> int:
        return math.prod(self.tensor.shape)

    def of(self, dtype: torch.dtype | None) -> torch.Tensor:
        """It on the meta device, with the global shape and without memory,
        as `model.to(dtype)` casts it.
        """
        cast = dtype if dtype is not None and self.tensor.is_floating_point() else self.tensor.dtype
        return torch.empty(tuple(self.tensor.shape), dtype=cast, device="meta")

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """The rows on a rank, [begin, end); (0, 1) of a tensor without dimensions."""
        rows = self.tensor.shape[0] if self.tensor.ndim else 1
        return sharding.row_range(rows, rank, ranks) if self.split else (0, rows)

    def here(self, rank: int, ranks: int) -> int:
        """The number of values on a rank."""
        begin, end = self.rows(rank, ranks)
        return (end - begin) * math.prod(self.tensor.shape[1:])


def on_ranks(
    weights: Sequence[Weight], ranks: int, bytes_on: Callable[[int], int]
) -> tuple[int, ...]:
    """`bytes_on(rank)` for every rank. It is called once for neighbors that hold equally many rows
    of each weight, since a job of thousands of ranks has few different ones.
    """
    differ = {0}  # the ranks that hold other numbers of rows than the rank before
    for weight in weights:
        _, end = weight.rows(0, ranks)
        if weight.split and end:
            full = weight.tensor.shape[0] // end
            differ |= {full, full + 1}
    made: list[int] = []
    for rank in range(ranks):
        made.append(bytes_on(rank) if rank in differ else made[-1])
    return tuple(made)


def weights_of(model: nn.Module, parts: Mapping[int, int] | None) -> list[Weight]:
    """`parts`: the number of parts of each parameter by its id; None splits every one."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    read = {id(m._parameters.get("weight")) for m in embeddings}
    saved = {id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}

    def split(p: Tensor) -> bool:
        return p.ndim > 0 and (parts is None or parts[id(p)] > 1)

    parameters = [
        Weight(p, True, id(p) in saved, split(p), id(p) in read) for p in model.parameters()
    ]
    return parameters + [Weight(b, False, id(b) in saved, False) for b in model.buffers()]


def ranks_and_parts(model: nn.Module, ranks: Any) -> tuple[int, dict[int, int] | None]:
    """The number of ranks, and the number of parts of each parameter by its id; None where `ranks`
    is given, which splits every one.
    """
    if ranks is not None:
        return _count(ranks), None
    parts = _parts(model)
    return max(parts.values(), default=1), parts


def _parts(model: nn.Module) -> dict[int, int]:
    """The number of parts of each parameter, by its id: 1 where ranks hold all of it."""
    found, first = {}, ("", 1)
    for name, p in model.named_parameters():
        what = f"parameter {clean_name(name)!r}"
        found[id(p)] = count = sharding.row_shards(p, what)
        if count > 1 and first[1] not in (1, count):
            raise ValueError(
                f"{what} has {count} parts and {first[0]} has {first[1]}: which rank holds which "
                "parts is not known; pass ranks=, which counts all parameters in as many"
            )
        first = (what, count) if count > 1 else first
    return found


def _count(ranks: Any) -> int:
    """The number of parts of dimension 0."""
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        if ranks < 1:
            raise ValueError(f"ranks should be at least 1 but is: {ranks}")
        return ranks
    if not callable(getattr(ranks, "size", None)) or not hasattr(ranks, "mesh_dim_names"):
        raise TypeError(f"ranks should be a number or a DeviceMesh but is: {ranks!r}")
    if ranks.ndim > 2:
        raise ValueError(
            f"the mesh has {ranks.ndim} dimensions; fully_shard takes "
            "one, or two of which the last shards"
        )
    return int(ranks.size(ranks.ndim - 1))
