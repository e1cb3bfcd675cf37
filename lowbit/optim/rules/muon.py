"""Muon."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.muon import DEFAULTS, QUINTIC, Coefficients, MuonOptions
from lowbit.optim.orthogonal import OrthogonalOptimizer


class Muon(OrthogonalOptimizer):
    """torch.optim.Muon with low-bit momentum: steps by momentum whose singular values are made
    about 1.

    Muon is for the hidden matrices of a model. `MuonWithAdamW` steps the other parameters too. The
    update is rounded to bfloat16, orthogonalized by Newton-Schulz steps in bfloat16, and applied in
    float32. A parameter of three dimensions, [n, rows, columns], is a batch of n matrices. Results
    have the same bits for any number of threads and ranks, and any instruction set. Of a matrix
    whose rows or columns are sharded, one rank gets the whole update.

    Args:
        params: parameters of two or three dimensions, (name, parameter) pairs, or group dicts.
        lr: learning rate, a float or a tensor of one element; 1e-3 by default.
        weight_decay: decoupled, by the learning rate before `adjust_lr_fn`; 0.1 by default.
        momentum: decay of the running average of gradients; 0.95 by default.
        nesterov: True (default) steps by Nesterov's momentum.
        ns_coefficients: (a, b, c) of every step; K. Jordan's by default. A sequence of them has one
            for each step. "quintic" is K. Jordan's, "polar_express" the first `ns_steps` of
            arXiv:2505.16932, and "deepseek" eight of K. Jordan's and two of (2, -1.5, 0.5).
        eps: least norm by which an update is divided; 1e-7 by default.
        ns_steps: number of steps, below 100; 5 by default.
            It does not count for "deepseek" and for a sequence.
        adjust_lr_fn: "original" multiplies the learning rate by sqrt(max(1, rows / columns)),
            "match_rms_adamw" by 0.2 sqrt(max(rows, columns)); None (default) is "original".
        orthogonalize: "exact" computes products in a fixed order, so the bits do not depend on the
            processor, and a GPU has those of the CPU; "torch" uses torch's bfloat16 products, which
            are faster on a GPU; "auto" (default) is "exact" on the CPU and "torch" on a GPU.
        split: for matrices that are really several, such as fused QKV: a number of equal parts of
            the rows, the rows of each part, or patterns of names with either; None (default) splits
            none.
        normuon_beta2: decay of the second moment of each row, by which NorMuon (Li et al., 2025,
            arXiv:2510.05491) evens out the sizes of the rows of the orthogonalized update; its norm
            stays, as in the authors' code. The paper has 0.95. None (default) is plain Muon. State
            is one float32 number for each row.
        cautious_weight_decay: True decays only weights whose sign the update, which is subtracted,
            has too, or that it leaves (arXiv:2510.12402); False (default) decays all.
        foreach, maximize, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range, the messages are torch's; a parameter is
            neither a matrix nor a batch of them, lies in flat shards, is sharded where state cannot
            follow, or cannot be split so.
    """

    @arguments.documents_options(MuonOptions, DEFAULTS)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[MuonOptions],
    ) -> None:
        rule = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, rule, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and not param_group.get("use_muon", True):
            raise ValueError(
                "a parameter group has use_muon=False, and lowbit.Muon has no other rule; use "
                "lowbit.MuonWithAdamW"
            )
        super().add_param_group(param_group)

    add_param_group.__doc__ = OrthogonalOptimizer.add_param_group.__doc__
