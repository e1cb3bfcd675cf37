"""Steps of APOLLO and Fira: the passes of all parameters in lockstep
(docs/definitions/lowrank.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.lowrank_layout import LowRankLayout
from lowbit.state.reduce_groups import reduce_groups
from lowbit.step.buckets import buckets
from lowbit.step.group import StepGroup, refuse_overlap
from lowbit.step.phases import run_phases

PASSES = ("project", "sum_columns", "values", "measure", "norm", "apply")
INNER_BEFORE = "measure"  # the inner step comes after L and before the pass that measures N
Passes = Callable[[str], list[tuple[Tensor, Any, str]]]


@functools.lru_cache(maxsize=4096)
def refresh_seed(number: int, refresh: int) -> int:
    """The seed of a parameter's projection in the authors' code: its number at first,
    then drawn from the last seed.
    """
    seed = number
    for _ in range(refresh):
        generator = torch.Generator().manual_seed(seed)
        seed = int(torch.randint(0, 2**63 - 1, (15,), generator=generator, device="cpu")[-1])
    return seed


def exponent_above(x: float) -> int:
    """The smallest n with |x| <= 2^n."""
    mantissa, exponent = math.frexp(abs(x))
    return exponent - 1 if mantissa == 0.5 else exponent


class AnyWork(Protocol):
    """A parameter in one step: its passes and the tensors of its inner step."""

    lay: LowRankLayout
    state: dict[str, Tensor]
    group: dict[str, Any]
    low: Tensor
    n: Tensor

    @property
    def size(self) -> int: ...
    @staticmethod
    def passes_of(works: Any) -> Passes: ...
    def forget(self) -> None: ...


NORMAL_BOUND = 6.34  # bound of the normal numbers of csrc/core/lowrank/normal.h


class Matrix:
    """One parameter in one step, on any device."""

    def __init__(
        self, group: dict[str, Any], p: Tensor, lay: LowRankLayout, state: dict[str, Tensor]
    ) -> None:
        refuse_overlap(sharding.local(p))
        grad = sharding.dense_gradient(p)
        self.group, self.p, self.lay, self.state = group, p, lay, state
        self.grad = grad.contiguous()
        self.value = sharding.local(p)
        self.tall = lay.tall
        self.by_tensor = group.get("scale_type", "channel") == "tensor"
        self.limits = self.limited(group)
        self.stream = int(state["stream"])

    def hyper(self, lr: float) -> list[float]:
        """lr, beta1, beta2, weight_decay,
        and the factors of the update: before and after the limiter, and Fira's.
        """
        group, (beta1, beta2) = self.group, self.group["betas"]
        root = 1.0 if self.lay.fira else math.sqrt(group["scale"])
        front = group.get("scale_front", False)
        return [
            lr,
            float(beta1),
            float(beta2),
            group["weight_decay"],
            root if front else 1.0,
            1.0 if front else root,
            group["alpha"] if self.lay.fira else 1.0,
        ]

    @staticmethod
    def limited(group: Mapping[str, Any]) -> bool:
        """Whether the growth of the update's norm is limited."""
        return not group["disable_nl"]

    @property
    def max_rows(self) -> int:
        """The number of rows of the largest part on any rank,
        so that all ranks form the same buckets.
        """
        return -(-self.lay.own.global_rows // math.prod(g.size() for _, g in self.lay.own.cuts))

    def over_rows(self, tensor: Tensor, operation: str) -> list[tuple[Tensor, Any, str]]:
        return [(tensor, group, operation) for _, group in self.lay.own.cuts]

    @property
    def place(self) -> tuple[int, int]:
        """The local rows of P: the first, and how many."""
        entry = self.lay.projection
        return entry.offset[0], entry.local[0]

    @property
    def exponent(self) -> int:
        """The exponent of a bound of all entries of P, unless torch's generator draws it."""
        if self.lay.fira:
            return 0  # columns are unit vectors
        return exponent_above(NORMAL_BOUND * (1.0 / math.sqrt(self.lay.rank)))

    def torch_projection(self, refresh: int) -> tuple[Tensor, int]:
        """The local rows of torch's P, on the CPU,
        and the exponent of a bound of all its entries.
        """
        drawn = _torch_projection(self.lay, refresh)
        begin, rows = self.place
        return drawn.narrow(0, begin, rows).contiguous(), exponent_above(float(drawn.abs().max()))

    def _singular_vectors(self, kept: Tensor, g_scale: float) -> None:
        """Replaces P by the leading singular vectors of the whole gradient, computed on the CPU.

        P stays if the gradient has an infinity or NaN.
        """
        grad = sharding.whole(self.p.grad).contiguous().cpu()  # type: ignore[arg-type]
        found = torch.empty(self.lay.projection.shape, dtype=torch.float32, device="cpu")
        if ops.singular_vectors(grad, g_scale, found):
            kept.copy_(found.narrow(0, *self.place))


class Work(Matrix):
    """One parameter in one step on the CPU."""

    def __init__(
        self,
        group: dict[str, Any],
        p: Tensor,
        lay: LowRankLayout,
        state: dict[str, Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        super().__init__(group, p, lay, state)
        if self.value.device.type != "cpu":
            raise ValueError(
                "low-rank steps run on the CPU and CUDA, but a parameter is on "
                f"{self.value.device}; use full_precision=True or rank=None there"
            )
        self.g_scale = (-1.0 if group["maximize"] else 1.0) / (
            1.0 if grad_scale is None else float(grad_scale)
        )
        lr = group["lr"]
        self.lr = float(sharding.local(lr) if isinstance(lr, Tensor) else lr)
        self.hypers = self.hyper(self.lr)
        self.step = round(float(state["step"])) + 1
        self.divisor = 1.0

    @staticmethod
    def reads_found_inf(group: Mapping[str, Any], lay: LowRankLayout) -> bool:
        """Whether the host reads `found_inf` before the step."""
        return True

    @property
    def size(self) -> int:
        """Local elements, the same on every rank."""
        return self.max_rows * self.lay.own.global_cols

    @staticmethod
    def passes_of(works: Sequence[Work]) -> Passes:
        """The passes of a bucket: a function from a pass's name to what ranks reduce after it."""
        return lambda name: [one for work in works for one in getattr(work, name)()]

    # The passes. Each returns what ranks reduce before the next.

    def project(self) -> list[tuple[Tensor, Any, str]]:
        self.projection, self.bound = self._projection()
        if self.tall:
            self.low = ops.project_rows(self.grad, self.g_scale, self.projection)
            return []
        self.absmax = ops.column_absmax(self.grad, self.g_scale)
        return self.over_rows(self.absmax, "max")

    def sum_columns(self) -> list[tuple[Tensor, Any, str]]:
        if self.tall:
            return []
        self.sums = ops.project_columns(
            self.grad, self.g_scale, self.projection, self.absmax, self.bound
        )
        return self.over_rows(self.sums, "sum")

    def values(self) -> list[tuple[Tensor, Any, str]]:
        if not self.tall:
            self.low = ops.column_values(self.sums, self.absmax, self.bound)
            del self.sums, self.absmax
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
                self.grad,
                self.g_scale,
                self.low,
                self.projection,
                self.scales,
                self.tall,
                self.hypers,
            )
        elif self.limits:
            self.words = ops.apollo_norm(
                self.grad, self.g_scale, self.scales, self.tall, self.hypers
            )
        return self.over_rows(self.words, "sum") if self.limits else []

    def apply(self) -> list[tuple[Tensor, Any, str]]:
        if self.limits:
            norm = sharding.local(self.state["update_norm"])
            self.divisor = ops.limit(self.words, norm, self.group["gamma"])
        self._move()
        return []

    def _move(self) -> None:
        """Steps the parameter, by `hypers` and `divisor`."""
        lay, state = self.lay, self.state
        if self.lr == 0.0:
            return
        value = self.value.contiguous()  # a copy only if it is transposed
        compensation = sharding.local(state[lay.compensation.key]) if lay.compensation else None
        place = (
            self.tall,
            self.hypers,
            self.divisor,
            value,
            compensation,
            lay.param_format,
            lay.own.row_offset * lay.own.global_cols,
            self.group["seed"],
            self.stream,
            self.step,
        )
        if lay.fira:
            ops.fira_step(self.grad, self.n, self.projection, self.residual, *place)
        else:
            ops.apollo_step(self.grad, self.g_scale, self.scales, *place)
        if value is not self.value:
            self.value.copy_(value)

    def forget(self) -> None:
        """Releases the passes' tensors, so that a step has one bucket's at a time and not the
        model's.
        """
        for made in ("projection", "low", "absmax", "sums", "n", "scales", "words", "residual"):
            self.__dict__.pop(made, None)

    def _projection(self) -> tuple[Tensor, int]:
        """P (if not tall, the rows that match the gradient's),
        and the exponent of a bound of all its entries.
        """
        lay, group = self.lay, self.group
        refresh, rest = divmod(self.step - 1, group["update_proj_gap"])
        if lay.fira:
            kept = sharding.local(self.state["projection"])
            if rest == 0:
                self._singular_vectors(kept, self.g_scale)
            return kept, self.exponent
        if group["projection"] == "torch":
            return self.torch_projection(refresh)
        begin, rows = self.place
        p = torch.empty(rows, lay.rank, dtype=torch.float32, device="cpu")
        ops.projection(p, group["seed"], self.stream, refresh, begin)
        return p, self.exponent


def _torch_projection(lay: LowRankLayout, refresh: int) -> Tensor:
    """The projection that the authors' code draws on a CPU, as P[a][k]."""
    generator = torch.Generator().manual_seed(refresh_seed(lay.number_of, refresh))
    rows, cols = lay.own.shape
    shape = (lay.rank, cols) if lay.tall else (rows, lay.rank)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    drawn = drawn / math.sqrt(lay.rank)
    return drawn.t() if lay.tall else drawn


def run(works: Sequence[AnyWork], inner: Callable[[list[AnyWork]], Sequence[StepGroup]]) -> None:
    """Steps the parameters of one device pass by pass: one collective for each process group,
    operation and dtype.

    Args:
        works: the parameters.
        inner: returns the step groups of some parameters' inner step, ready to be called.
    """
    for bucket in buckets(works, lambda work: work.size):
        passes = type(bucket[0]).passes_of(bucket)
        for name in PASSES:
            if name == INNER_BEFORE:
                run_phases(inner(bucket))
            wanted = passes(name)
            if wanted:
                sharding.reduce_over(wanted)
        for work in bucket:
            work.forget()


def add_inner(step_group: StepGroup, work: AnyWork) -> None:
    """Adds the inner step of a parameter: L is its gradient,
    and it writes N in place of the parameter.
    """
    step_group.params.append(work.n)
    step_group.grads.append(work.low)
    for key in work.lay.keys:
        step_group.state.append(sharding.local(work.state[key]))
    step_group.steps.append(work.state["step"])
    step_group.rows.append((work.lay, work.state["stream"]))


def inner_place(number: int, work: AnyWork) -> Any:
    return (number, work.lay.phases, reduce_groups(work.lay))
