"""Adafactor's step around a low-rank scale, as adafactor-8bit 0.1.9 has it (docs/lowrank.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.step.lowrank import Work


class AdafactorWork(Work):
    """One parameter in one step on the CPU.

    The passes are APOLLO's. The norm pass also sums the squares of the weights, and the step is Adafactor's.
    """

    @staticmethod
    def limited(group: Mapping[str, Any]) -> bool:
        return group["fira_margin"] is not None

    def hyper(self, lr: float) -> list[float]:
        return self._numbers(lr, 0.0)

    @staticmethod
    def _numbers(eta: float, decay: float) -> list[float]:
        """The numbers of `apollo_step` for p = p - eta u, p = p - decay p: betas of 0 correct no bias, and there is no other factor."""
        return [eta, 0.0, 0.0, decay / eta if eta else 0.0, 1.0, 1.0, 1.0]

    def norm(self) -> list[tuple[Tensor, Any, str]]:
        if self.by_tensor:
            self.scales = ops.tensor_scale(self.words)
        self.words = ops.apollo_norm(self.grad, self.g_scale, self.scales, self.tall, self.hypers)
        wanted = self.over_rows(self.words, "sum")
        if self.group["scale_parameter"]:
            one = torch.ones((), dtype=torch.float32, device="cpu")
            self.squares = ops.apollo_norm(self._weights(), 1.0, one, self.tall, self.hypers)
            wanted += self.over_rows(self.squares, "sum")
        return wanted

    def _weights(self) -> Tensor:
        """The parameter as it was before the step, with its compensation."""
        lay, value = self.lay, self.value.contiguous()
        if lay.compensation is None:
            return value
        kept = sharding.local(self.state[lay.compensation.key])
        return ops.join(value, kept, lay.param_format)

    def apply(self) -> list[tuple[Tensor, Any, str]]:
        group, root = self.group, math.sqrt(math.prod(self.lay.own.shape))
        norm, limit = ops.exact_norm(self.words), 1.0
        if self.limits:
            kept = sharding.local(self.state["update_norm"])
            limit = ops.limit(self.words, kept, 1.0 + group["fira_margin"])
        rho = min(self.lr, 1.0 / math.sqrt(self.step)) if group["relative_step"] else self.lr
        alpha = rho
        if group["scale_parameter"]:
            alpha *= max(ops.exact_norm(self.squares) / root, group["eps"][1])
        clip = 1.0 if group["d"] is None else norm / limit / (root * group["d"])
        step = alpha if clip <= 1.0 else alpha / clip  # a NaN stays
        decay = group["weight_decay"] * {"lr": self.lr, "rho": rho, "alpha": alpha}[group["decay_by"]]  # fmt: skip
        if decay == 1.0:
            raise ValueError(
                f"weight_decay={group['weight_decay']} by decay_by={group['decay_by']!r} decays every weight to 0 in this step; decay less"
            )
        # The weights decay first, and the operator does so last: (p - eta u) (1 - decay), where the step has been
        # divided by 1 - decay.
        self.divisor, self.hypers = limit, self._numbers(step / (1.0 - decay), decay)
        self._move()
        return []

    def forget(self) -> None:
        super().forget()
        self.__dict__.pop("squares", None)
