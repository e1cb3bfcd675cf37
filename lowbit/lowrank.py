"""Steps of APOLLO and Fira: how low-rank state is laid out, and the passes of all parameters in lockstep (docs/lowrank.md)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit import layout, ops, shard
from lowbit.batch import Batch, reductions, refuse_overlap, run_phases
from lowbit.overrides import clean_name, effective

INNER = "apollo_inner"
TOGETHER = 1 << 24  # local elements whose scratch is held at once; a larger parameter goes alone
_PARAM_FORMAT = 5  # column of a plan row


PASSES = ("project", "sum_columns", "values", "measure", "norm", "apply")
INNER_BEFORE = "measure"  # the inner step comes between L and what measures N
Passes = Callable[[str], list[tuple[Tensor, Any, str]]]

_NOWHERE = shard.Part((), (), ())


class StepCount:
    """How often a parameter on another device was stepped: read there once and then counted here, until somebody else writes the tensor."""

    def __init__(self) -> None:
        self.known: tuple[Tensor, int, int] | None = None  # the tensor, its version, its value

    def next(self, step: Tensor) -> int:
        """The number of the step that begins. Forgotten until `stepped` says that it has been done."""
        known, self.known = self.known, None
        if known is not None and known[0] is step and known[1] == step._version:
            return known[2] + 1
        return round(float(step)) + 1

    def stepped(self, step: Tensor, count: int) -> None:
        self.known = (step, step._version, count)


@dataclass(frozen=True)
class LowRankLayout(layout.Layout):
    """State of a matrix R x C that is stepped in a subspace. `part` is what is here of L, [R, rank] where R >= C (tall), else [rank, C]."""

    own: shard.Part = _NOWHERE
    rank: int = 0
    fira: bool = False
    number_of: int = 0  # of the parameter, counted from 1 over all groups
    steps: StepCount = field(default_factory=StepCount, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = tuple(e.key for slot in self.slots for e in self.of_slots[slot.name])
        object.__setattr__(self, "keys", keys)  # what the inner step takes

    @functools.cached_property
    def tall(self) -> bool:
        return self.own.global_rows >= self.own.global_cols

    @functools.cached_property
    def extra(self) -> layout.Entry | None:  # type: ignore[override]
        own = layout.Layout(INNER, self.own, (), self.param_format, 0)
        return own.extra

    @functools.cached_property
    def projection(self) -> layout.Entry:
        """P, [min(R, C), rank]: whole where tall, else the rows that go with the parameter's."""
        own, f32 = self.own, torch.float32
        if self.tall:
            shape = (own.global_cols, self.rank)
            return layout.Entry("projection", f32, shape, shape, (0, 0), (-1, -1))
        return layout.Entry(
            "projection", f32, (own.global_rows, self.rank), (own.rows, self.rank),
            (own.row_offset, 0), (0, -1),
        )  # fmt: skip

    @property
    def others(self) -> list[layout.Entry]:
        norm = layout.Entry("update_norm", torch.float32, (), (), (), ())
        return [norm, self.projection] if self.fira else [norm]

    def plan_row(self, stream: int) -> list[int]:
        row = super().plan_row(stream)
        row[_PARAM_FORMAT] = ops.param_format("float32")["index"]  # it is N that is written
        return row


def rank_of(group: Mapping[str, Any], shape: Sequence[int], name: str | None) -> int:
    """The rank in which a parameter of this global shape is stepped; 0 where it is not."""
    rank = group["rank"]
    if rank is None or len(shape) != 2 or layout.named_wide(name, group["wide"]):
        return 0
    if rank == "quarter":
        rank = max(1, min(shape) // 4)
    return rank if min(shape) > rank else 0


def layout_of(
    group: Mapping[str, Any], p: Tensor, name: str | None, index: int, rank: int, fira: bool
) -> LowRankLayout:
    """The layout of a matrix.

    Raises:
        ValueError: its columns are cut.
    """
    name = None if name is None else clean_name(name)
    what = f"parameter {name!r}" if name else f"parameter {index}"
    own, options = shard.part(p, what), effective(group, name, index)
    if isinstance(p, shard.Piece):
        raise ValueError(
            f"{what} lies in flat shards of FSDP1, and rank {rank} of it needs whole rows; use fully_shard, or step it without a subspace by "
            f"wide=[{name!r}] or a group with rank=None"
        )
    if not own.whole_rows or any(dim != 0 for dim, _ in own.cuts):
        raise ValueError(
            f"{what} of {own.global_cols} columns is cut at columns {own.col_offset}..{own.col_offset + own.cols}, and rank {rank} of it needs "
            f"whole rows; shard it on dimension 0, or step it without a subspace by wide=[{name!r}] or a group with rank=None"
        )
    if own.global_rows >= own.global_cols:
        low = shard.Part(
            (own.global_rows, rank), (own.rows, rank), (own.row_offset, 0), own.cuts, (0, -1)
        )
    else:
        shape = (rank, own.global_cols)
        low = shard.Part(shape, shape, (0, 0), (), (-1, 1))
    chosen, wide = layout.chosen_of(INNER, low, options, name)
    slots = layout.slots_of(INNER, chosen, wide)
    return LowRankLayout(
        INNER, low, slots, layout.param_format_of(p, options["param_format"], what),
        layout.stream_of(name, index), own=own, rank=rank, fira=fira, number_of=index + 1,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def refresh_seed(number: int, refresh: int) -> int:
    """The seed that the authors' code draws a parameter's projection from: its number at first, then from each the next."""
    seed = number
    for _ in range(refresh):
        generator = torch.Generator().manual_seed(seed)
        seed = int(torch.randint(0, 2**63 - 1, (15,), generator=generator)[-1])
    return seed


def exponent_above(x: float) -> int:
    """The least n with |x| <= 2^n."""
    mantissa, exponent = math.frexp(abs(x))
    return exponent - 1 if mantissa == 0.5 else exponent


class AnyWork(Protocol):
    """A parameter in one step: its passes, and what the inner step takes of it."""

    lay: LowRankLayout
    state: dict[str, Tensor]
    group: dict[str, Any]
    low: Tensor
    n: Tensor

    @property
    def size(self) -> int: ...
    @staticmethod
    def together(works: Any) -> Passes: ...
    def forget(self) -> None: ...


NORMAL_BOUND = 6.34  # of our own normal numbers, csrc/core/lowrank/normal.h


class Matrix:
    """One parameter in one step, on any device."""

    def __init__(self, group: dict[str, Any], p: Tensor, lay: LowRankLayout, state: dict[str, Tensor]) -> None:  # fmt: skip
        refuse_overlap(shard.local(p))
        grad = shard.dense_gradient(p)
        self.group, self.p, self.lay, self.state = group, p, lay, state
        self.grad = grad.contiguous()
        self.value = shard.local(p)
        self.tall = lay.tall
        self.by_tensor = group.get("scale_type", "channel") == "tensor"
        self.limits = not group["disable_nl"]
        self.stream = int(state["stream"])

    def hyper(self, lr: float) -> list[float]:
        """lr, beta1, beta2, weight_decay, and what the update is multiplied by: before and after the limiter, and for Fira."""
        group, (beta1, beta2) = self.group, self.group["betas"]
        root = 1.0 if self.lay.fira else math.sqrt(group["scale"])
        front = group.get("scale_front", False)
        return [
            lr, float(beta1), float(beta2), group["weight_decay"],
            root if front else 1.0, 1.0 if front else root, group["alpha"] if self.lay.fira else 1.0,
        ]  # fmt: skip

    @property
    def most_rows(self) -> int:
        """Of the largest part on any rank, so that all ranks form the same buckets."""
        return -(-self.lay.own.global_rows // math.prod(g.size() for _, g in self.lay.own.cuts))

    def over_rows(self, tensor: Tensor, operation: str) -> list[tuple[Tensor, Any, str]]:
        return [(tensor, group, operation) for _, group in self.lay.own.cuts]

    @property
    def place(self) -> tuple[int, int]:
        """What is here of P: its first row and how many."""
        entry = self.lay.projection
        return entry.offset[0], entry.local[0]

    @property
    def exponent(self) -> int:
        """Of a bound of all entries of a P that is not torch's."""
        if self.lay.fira:
            return 0  # vectors of length 1
        return exponent_above(NORMAL_BOUND * (1.0 / math.sqrt(self.lay.rank)))

    def torch_projection(self, refresh: int) -> tuple[Tensor, int]:
        """The rows of torch's P that are here, on the CPU, and the exponent of a bound of all its entries."""
        drawn = _torch_projection(self.lay, refresh)
        begin, rows = self.place
        return drawn.narrow(0, begin, rows).contiguous(), exponent_above(float(drawn.abs().max()))

    def _singular_vectors(self, kept: Tensor, g_scale: float) -> None:
        """Replaces P by the leading singular vectors of the whole gradient, found on the CPU; where that has an infinity or a NaN, P stays."""
        grad = shard.whole(self.p.grad).contiguous().cpu()  # type: ignore[arg-type]
        found = torch.empty(self.lay.projection.shape, dtype=torch.float32, device="cpu")
        if ops.singular_vectors(grad, g_scale, found):
            kept.copy_(found.narrow(0, *self.place))


class Work(Matrix):
    """One parameter in one step on the CPU."""

    def __init__(self, group: dict[str, Any], p: Tensor, lay: LowRankLayout, state: dict[str, Tensor], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:  # fmt: skip
        super().__init__(group, p, lay, state)
        if self.value.device.type != "cpu":
            raise ValueError(
                f"low-rank steps run on the CPU and CUDA, and a parameter is on {self.value.device}; use wide=True or rank=None there"
            )
        self.g_scale = (-1.0 if group["maximize"] else 1.0) / (
            1.0 if grad_scale is None else float(grad_scale)
        )
        lr = group["lr"]
        self.lr = float(shard.local(lr) if isinstance(lr, Tensor) else lr)
        self.hypers = self.hyper(self.lr)
        self.step = round(float(state["step"])) + 1
        self.divisor = 1.0

    @staticmethod
    def looks(group: Mapping[str, Any], lay: LowRankLayout) -> bool:
        """Whether `found_inf` is looked at before the step, and not in it."""
        return True

    @property
    def size(self) -> int:
        """What a bucket holds so much of."""
        return self.most_rows * self.lay.own.global_cols

    @staticmethod
    def together(works: Sequence[Work]) -> Passes:
        """The passes of a bucket: by name, each returns what ranks reduce before the next."""
        return lambda name: [one for work in works for one in getattr(work, name)()]

    # The passes; each returns what ranks reduce before the next.

    def project(self) -> list[tuple[Tensor, Any, str]]:
        self.projection, self.bound = self._projection()
        if self.tall:
            self.low = ops.project_rows(self.grad, self.g_scale, self.projection)
            return []
        self.most = ops.column_most(self.grad, self.g_scale)
        return self.over_rows(self.most, "max")

    def sum_columns(self) -> list[tuple[Tensor, Any, str]]:
        if self.tall:
            return []
        self.sums = ops.project_columns(
            self.grad, self.g_scale, self.projection, self.most, self.bound
        )
        return self.over_rows(self.sums, "sum")

    def values(self) -> list[tuple[Tensor, Any, str]]:
        if not self.tall:
            self.low = ops.column_values(self.sums, self.most, self.bound)
            del self.sums, self.most
        self.n = torch.empty_like(self.low)
        return []

    def measure(self) -> list[tuple[Tensor, Any, str]]:
        if not self.by_tensor:
            self.scales = ops.channel_scales(self.n, self.low, self.tall)
            return []
        self.words = ops.squares(self.n, self.low)
        return self.over_rows(self.words, "sum") if self.tall else []

    def norm(self) -> list[tuple[Tensor, Any, str]]:
        if self.by_tensor:
            self.scales = ops.tensor_scale(self.words)
        if self.lay.fira:
            self.residual, self.words = ops.fira_norm(
                self.grad, self.g_scale, self.low, self.projection, self.scales, self.tall, self.hypers
            )  # fmt: skip
        elif self.limits:
            self.words = ops.apollo_norm(
                self.grad, self.g_scale, self.scales, self.tall, self.hypers
            )
        return self.over_rows(self.words, "sum") if self.limits else []

    def apply(self) -> list[tuple[Tensor, Any, str]]:
        lay, state = self.lay, self.state
        if self.limits:
            norm = shard.local(state["update_norm"])
            self.divisor = ops.limit(self.words, norm, self.group["gamma"])
        if self.lr == 0.0:
            return []
        value = self.value.contiguous()  # itself, but for a transposed one
        extra = shard.local(state[lay.extra.key]) if lay.extra else None
        place = (
            self.tall, self.hypers, self.divisor, value, extra, lay.param_format,
            lay.own.row_offset * lay.own.global_cols, self.group["seed"], self.stream, self.step,
        )  # fmt: skip
        if lay.fira:
            ops.fira_step(self.grad, self.n, self.projection, self.residual, *place)
        else:
            ops.apollo_step(self.grad, self.g_scale, self.scales, *place)
        if value is not self.value:
            self.value.copy_(value)
        return []

    def forget(self) -> None:
        """Drops what the passes made, so that a step holds one bucket's numbers at a time and not the model's."""
        for made in ("projection", "low", "most", "sums", "n", "scales", "words", "residual"):
            self.__dict__.pop(made, None)

    def _projection(self) -> tuple[Tensor, int]:
        """P (its rows that go with the gradient's, where not tall), and the exponent of a bound of all its entries."""
        lay, group = self.lay, self.group
        refresh, rest = divmod(self.step - 1, group["update_proj_gap"])
        if lay.fira:
            kept = shard.local(self.state["projection"])
            if rest == 0:
                self._singular_vectors(kept, self.g_scale)
            return kept, self.exponent
        if group["projection"] == "torch":
            return self.torch_projection(refresh)
        begin, rows = self.place
        p = torch.empty(rows, lay.rank, dtype=torch.float32)
        ops.projection(p, group["seed"], self.stream, refresh, begin)
        return p, self.exponent


def _torch_projection(lay: LowRankLayout, refresh: int) -> Tensor:
    """What the authors' code draws on a CPU, as P[a][k]."""
    generator = torch.Generator().manual_seed(refresh_seed(lay.number_of, refresh))
    rows, cols = lay.own.shape
    shape = (lay.rank, cols) if lay.tall else (rows, lay.rank)
    drawn = torch.randn(shape, generator=generator) / math.sqrt(lay.rank)
    return drawn.t() if lay.tall else drawn


def _buckets(works: Sequence[AnyWork]) -> Iterator[list[AnyWork]]:
    bucket: list[AnyWork] = []
    held = 0
    for work in works:
        if bucket and held + work.size > TOGETHER:
            yield bucket
            bucket, held = [], 0
        bucket.append(work)
        held += work.size
    if bucket:
        yield bucket


def run(works: Sequence[AnyWork], inner: Callable[[list[AnyWork]], Sequence[Batch]]) -> None:
    """Steps the parameters of one device: pass by pass, so that one pass takes one collective for each kind of number.

    Args:
        inner: the batches of the inner step of some of them, ready to be called.
    """
    for bucket in _buckets(works):
        passes = type(bucket[0]).together(bucket)
        for name in PASSES:
            if name == INNER_BEFORE:
                run_phases(inner(bucket))
            wanted = passes(name)
            if wanted:
                shard.reduce_over(wanted)
        for work in bucket:
            work.forget()


def add_inner(batch: Batch, work: AnyWork) -> None:
    """The inner step of a parameter: L is its gradient, and N is written to what it takes for the parameter."""
    batch.params.append(work.n)
    batch.grads.append(work.low)
    for key in work.lay.keys:
        batch.state.append(shard.local(work.state[key]))
    batch.steps.append(work.state["step"])
    batch.rows.append((work.lay, work.state["stream"]))


def inner_place(number: int, work: AnyWork) -> Any:
    return (number, work.lay.phases, reductions(work.lay))
