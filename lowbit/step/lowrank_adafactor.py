"""Adafactor's step around a low-rank scale, as adafactor-8bit 0.1.9 has it
(docs/definitions/lowrank.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.lowrank_layout import LowRankLayout
from lowbit.step.lowrank import Work


class AdafactorWork(Work):
    """One parameter in one step on the CPU.

    The passes are APOLLO's. The first one also sums the squares of the weights,
    and the step is Adafactor's.
    """

    def __init__(
        self,
        group: dict[str, Any],
        p: Tensor,
        lay: LowRankLayout,
        state: dict[str, Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        super().__init__(group, p, lay, state, grad_scale, found_inf)
        self.root = math.sqrt(math.prod(lay.own.shape))
        self.rho = min(self.lr, 1.0 / math.sqrt(self.step)) if group["relative_step"] else self.lr
        self.alpha = self.rho
        if group["decay_by"] != "alpha":
            self._decay()  # refused before any parameter has moved

    @staticmethod
    def limited(group: Mapping[str, Any]) -> bool:
        return group["fira_margin"] is not None

    def hyper(self, lr: float) -> list[float]:
        return self._numbers(lr, 0.0)

    @staticmethod
    def _numbers(eta: float, decay: float) -> list[float]:
        """The numbers of `apollo_step` for p = p - eta u, p = p - decay p: betas of 0 correct no
        bias, and there is no other factor.
        """
        return [eta, 0.0, 0.0, decay / eta if eta else 0.0, 1.0, 1.0, 1.0]

    def project(self) -> list[tuple[Tensor, Any, str]]:
        wanted = super().project()
        if self.group["scale_parameter"]:
            one = torch.ones((), dtype=torch.float32, device="cpu")
            self.squares = ops.apollo_norm(self._weights(), 1.0, one, self.tall, self.hypers)
            wanted += self.over_rows(self.squares, "sum")
        return wanted

    def values(self) -> list[tuple[Tensor, Any, str]]:
        if self.group["scale_parameter"]:
            self.alpha *= max(ops.exact_norm(self.squares) / self.root, self.group["eps"][1])
        self._decay()  # before the inner step, which writes state
        return super().values()

    def _decay(self) -> float:
        """The share of itself that every weight loses in this step."""
        by, factors = self.group["decay_by"], {"lr": self.lr, "rho": self.rho, "alpha": self.alpha}
        decay: float = self.group["weight_decay"] * factors[by]
        if decay == 1.0:
            raise ValueError(
                f"weight_decay={self.group['weight_decay']} by decay_by={by!r} decays every weight "
                "to 0 in this step; decay less"
            )
        return decay

    def norm(self) -> list[tuple[Tensor, Any, str]]:
        if self.by_tensor:
            self.scales = ops.tensor_scale(self.words)
        self.words = ops.apollo_norm(self.grad, self.g_scale, self.scales, self.tall, self.hypers)
        return self.over_rows(self.words, "sum")

    def _weights(self) -> Tensor:
        """The parameter as it was before the step, with its compensation."""
        lay, value = self.lay, self.value.contiguous()
        if lay.compensation is None:
            return value
        kept = sharding.local(self.state[lay.compensation.key])
        return ops.join(value, kept, lay.param_format)

    def apply(self) -> list[tuple[Tensor, Any, str]]:
        group = self.group
        norm, limit = ops.exact_norm(self.words), 1.0
        if self.limits:
            kept = sharding.local(self.state["update_norm"])
            limit = ops.limit(self.words, kept, 1.0 + group["fira_margin"])
        clip = 1.0 if group["d"] is None else norm / limit / (self.root * group["d"])
        step = self.alpha if clip <= 1.0 else self.alpha / clip  # a NaN stays
        decay = self._decay()
        # The weights decay first, and the operator does so last: (p - eta u) (1 - decay), where the
        # step has been divided by 1 - decay.
        self.divisor, self.hypers = limit, self._numbers(step / (1.0 - decay), decay)
        self._move()
        return []

    def forget(self) -> None:
        super().forget()
        self.__dict__.pop("squares", None)
