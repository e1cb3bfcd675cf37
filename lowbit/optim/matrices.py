"""Matrices that step in several passes beside parameters that AdamW steps: what Muon,
APOLLO and Fira share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.optim.one_step import Step
from lowbit.optim.optimizer import LowbitOptimizer

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class MatrixOptimizer(LowbitOptimizer):
    """The base of optimizers whose own rule is for matrices and takes several passes.
    AdamW steps all else.
    """

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "adamw"

    def step_params(self, params: Iterable[tuple[int, Any]], step: Step) -> None:
        matrices: list[tuple[int, Any]] = []
        plain: list[tuple[int, Any]] = []
        for number, p in params:
            (matrices if self.layouts[p].in_passes else plain).append((number, p))
        self._check_gradients(matrices)  # before anything steps
        super().step_params(plain, step)
        if matrices:
            self._update_uncompiled(matrices, step.grad_scale, step.found_inf)

    def _check_gradients(self, matrices: Iterable[tuple[int, Any]]) -> None:
        for _, p in matrices:
            grad = sharding.local(p.grad)
            sharding.check_dense(grad)
            if grad.dtype not in _GRADIENTS:
                raise RuntimeError(
                    f"the gradient of parameter {self._what(p)} is {grad.dtype}; gradients must be "
                    "float32, bfloat16 or float16"
                )

    # torch.compiler.disable, which would import the compiler with this module
    @torch._disable_dynamo
    def _update_uncompiled(self, *args: Any) -> None:
        self._update_matrices(*args)

    def _update_matrices(
        self,
        params: Sequence[tuple[int, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Steps these matrices, each with the number of its group."""
        raise NotImplementedError
