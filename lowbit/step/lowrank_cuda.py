"""Low-rank steps on a GPU: each pass is one operator call for all matrices of a bucket,
without waiting for the device.

docs/definitions/lowrank.md describes the passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.lowrank_layout import LowRankLayout
from lowbit.step.lowrank import PASSES, Matrix, Passes
from lowbit.step.numbers import lr_beside

_SUMS = 3  # exact sums: squares of N, of L and of the update


class CudaWork(Matrix):
    """One parameter in one step on a GPU. The CPU computes P for Fira, at a refresh only,
    and for torch's generator.
    """

    low: Tensor
    n: Tensor

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
        self.grad_scale, self.found_inf = grad_scale, found_inf
        self.count = 0  # the number of the step, if the host needs it
        if self.reads_found_inf(group, lay):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a low-rank step whose projection is made on the CPU (Fira, or "
                    "projection='torch') cannot be captured in a CUDA graph; use APOLLO with "
                    "projection='philox', or step outside the graph"
                )
            self.count = lay.steps.next(state["step"])

    @staticmethod
    def reads_found_inf(group: Mapping[str, Any], lay: LowRankLayout) -> bool:
        """Whether the host needs the number of the step, and so whether it was skipped."""
        return lay.fira or group["projection"] == "torch"

    def parts(self) -> list[tuple[str, int]]:
        """(name, size) of the float32 numbers that live from the first pass to the last."""
        own, rank = self.lay.own, self.lay.rank
        rows, cols = own.rows, own.global_cols
        low = rank * (rows if self.tall else cols)
        channels = 1 if self.by_tensor else rows if self.tall else cols
        return [
            ("p", 0 if self.lay.fira else self.place[1] * rank),
            ("low", low),
            ("n", low),
            ("scales", channels),
            ("residual", rows * cols if self.lay.fira else 0),
        ]

    @property
    def size(self) -> int:
        own, rank, rows = self.lay.own, self.lay.rank, self.max_rows
        held = rank * (own.global_cols + 2 * rows if self.tall else rows + 4 * own.global_cols)
        return held + (rows * own.global_cols if self.lay.fira else 0)

    def plan_row(self) -> list[int]:
        lay, group = self.lay, self.group
        draws = not self.reads_found_inf(group, lay)
        columns = {
            "rows": lay.own.rows,
            "cols": lay.own.global_cols,
            "rank": lay.rank,
            "tall": self.tall,
            "fira": lay.fira,
            "draws": draws,
            "by_tensor": self.by_tensor,
            "limits": self.limits,
            "maximize": group["maximize"],
            "first": lay.own.row_offset * lay.own.global_cols,
            "first_of_p": self.place[0],
            "gap": group["update_proj_gap"],
            "seed": group["seed"],
            "stream": self.stream,
            "param_format": ops.param_format(lay.param_format)["index"],
            "exponent": self.bound,
        }
        return [columns[name] for name in ops.policy("lowrank_plan")]

    def begin(self, floats: Sequence[Tensor], absmax: Tensor, sums: Tensor, words: Tensor) -> None:
        """Sets its views of the bucket's tensors, and P unless the device draws it."""
        self.p_here, low, n, self.scales, self.residual = floats
        rank = self.lay.rank
        shape = (-1, rank) if self.tall else (rank, -1)
        self.low, self.n = low.view(shape), n.view(shape)
        self.absmax, self.sums, self.words = absmax, sums, words.view(3, -1)
        self.written = self.value.contiguous()  # a copy only if it is transposed
        self.bound = self.exponent
        refresh, rest = divmod(self.count - 1, self.group["update_proj_gap"])
        if self.lay.fira:
            self.p_here = sharding.local(self.state["projection"])
            if rest == 0:
                scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
                self._singular_vectors(
                    self.p_here, (-1.0 if self.group["maximize"] else 1.0) / scale
                )
        elif self.reads_found_inf(self.group, self.lay):
            drawn, self.bound = self.torch_projection(refresh)
            self.p_here.copy_(drawn.view(-1))

    def tensors(self, nothing: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that passes read, and those that they write, in the operator's order."""
        lr, compensation = self.lr, self.lay.compensation
        return (
            [self.grad, self.state["step"], lr if isinstance(lr, Tensor) else nothing],
            [
                self.written,
                sharding.local(self.state[compensation.key]) if compensation else nothing,
                self.p_here,
                self.low,
                self.n,
                self.scales,
                self.residual,
                sharding.local(self.state["update_norm"]),
                self.absmax,
                self.sums,
                self.words,
            ],
        )

    @property
    def lr(self) -> Tensor | float:
        """The learning rate; a tensor if it is on a device, where it is read."""
        lr = self.group["lr"]
        if not isinstance(lr, Tensor):
            return float(lr)
        lr = lr_beside(sharding.local(lr), self.value.device)
        return float(lr) if lr.device.type == "cpu" else lr

    # What ranks reduce after a pass.

    def reduced(self, name: str) -> list[tuple[Tensor, Any, str]]:
        if name == "project" and not self.tall:
            return self.over_rows(self.absmax, "max")
        if name == "sum_columns" and not self.tall:
            return self.over_rows(self.sums, "sum")
        if name == "measure" and self.by_tensor and self.tall:
            return self.over_rows(self.words[:2], "sum")
        if name == "norm" and self.limits:
            return self.over_rows(self.words[2], "sum")
        return []

    @staticmethod
    def passes_of(works: Sequence[CudaWork]) -> Passes:
        return _Bucket(works)

    def end(self) -> None:
        if self.written is not self.value:
            self.value.copy_(self.written)
        if self.count:
            self.lay.steps.stepped(self.state["step"], self.count)

    def forget(self) -> None:
        """Releases the passes' tensors."""
        for made in (
            "p_here",
            "low",
            "n",
            "scales",
            "residual",
            "absmax",
            "sums",
            "words",
            "written",
        ):
            self.__dict__.pop(made, None)


class _Bucket:
    """The passes of matrices on one device that are stepped together."""

    def __init__(self, works: Sequence[CudaWork]) -> None:
        self.works = works
        device = works[0].value.device
        parts = [[size for _, size in work.parts()] for work in works]
        cols = [0 if work.tall else work.lay.own.global_cols for work in works]
        ranks = [work.lay.rank for work in works]
        floats = torch.empty(sum(map(sum, parts)), dtype=torch.float32, device=device)
        of_floats = iter(floats.split([size for sizes in parts for size in sizes]))
        absmax = torch.zeros(sum(cols), dtype=torch.int32, device=device).split(cols)
        sizes = [
            size
            for c, rank in zip(cols, ranks, strict=True)
            for size in (_SUMS * ops.sum_words(), c * rank)
        ]
        of_sums = iter(torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes))
        for work, of_work, columns in zip(works, parts, absmax, strict=True):
            words, sums = next(of_sums), next(of_sums)
            work.begin([next(of_floats) for _ in of_work], columns, sums, words)
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        tensors = [work.tensors(nothing) for work in works]
        hyper = [
            [*work.hyper(0.0 if isinstance(work.lr, Tensor) else work.lr), work.group["gamma"]]
            for work in works
        ]
        self.arguments = (
            [t for read, _ in tensors for t in read],
            [t for _, written in tensors for t in written],
            torch.tensor([work.plan_row() for work in works], dtype=torch.int64, device="cpu"),
            torch.tensor(hyper, dtype=torch.float64, device="cpu"),
            torch.empty(ops.lowrank_room() * len(works), dtype=torch.uint8, device=device),
            works[0].grad_scale,
            works[0].found_inf,
        )

    def __call__(self, name: str) -> list[tuple[Tensor, Any, str]]:
        ops.lowrank_pass(PASSES.index(name), *self.arguments)
        if name == PASSES[-1]:
            for work in self.works:
                work.end()
        return [one for work in self.works for one in work.reduced(name)]
