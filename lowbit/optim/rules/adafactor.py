"""Adafactor: second moments as means of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit import sharding
from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.lowrank import LowRankOptimizer, check_subspace
from lowbit.optim.rules.apollo import check_projection
from lowbit.state import lowrank_layout
from lowbit.state.layout import Layout
from lowbit.step.lowrank_adafactor import AdafactorWork

_DECAY_BY = ("lr", "rho", "alpha")
_SUBSPACE_EPS = 1e-8  # in a subspace, under the root; adafactor-8bit's


class Adafactor(LowRankOptimizer):
    """Adafactor (arXiv:1804.04235) as in torch.optim.Adafactor,
    with the options of adafactor-8bit and transformers.

    Parameters of two or more dimensions keep the second moment as float32 means of rows and columns
    over the last two dimensions; vectors keep it element by element. Sums over a tensor are exact,
    so results do not depend on sharding.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: upper bound of the relative step, or the step itself if relative_step is False;
            1e-2 by default.
        beta2_decay: the weight of the new squared gradient is step ** beta2_decay; -0.8 by default.
        eps: (eps1, eps2), (None, 1e-3) by default. eps1 is the floor of the second moment's root.
            None means float32's machine epsilon for every dtype; torch takes bfloat16's (7.8e-3),
            above every second moment. eps2 is the floor of the parameter's root mean square.
        d: upper bound of the update's root mean square; 1 by default. None disables it.
        weight_decay: decoupled; 0 by default.
        maximize: maximizes the objective instead; False by default.
        foreach: accepted for torch's signature and ignored.
        beta1: decay of a first moment, which is kept in `state_format`; None (default) keeps none.
        beta2: a fixed decay instead of beta2_decay; None by default.
        relative_step: limits the step to 1 / sqrt(step); True by default.
        scale_parameter: makes steps relative to the parameter's root mean square; True by default.
        decay_by: the factor of weight decay: "lr" (default, as in torch), "rho" (the relative step)
            or "alpha" (that times the parameter's scale).
        fira_margin: Fira's norm-growth limiter: an update's norm grows by at most this share.
            None (default) disables it.
        factored: False keeps every second moment element by element; True by default.
        add_eps: adds eps1 to the squared gradient; False by default.
        rank: the rank of a random projection of each matrix, whose second moment scales the
            gradient as APOLLO's does: the low-rank path of adafactor-8bit 0.1.9
            (docs/definitions/lowrank.md). None (default) uses none; "quarter" is a quarter of the
            shorter side. Other parameters are matrices that are not larger than `rank` on both
            sides or are named by `full_precision`, and all that are not matrices. In the subspace
            eps1 ** 2 is added to the second moment under the root, and None means 1e-8 there. On
            the CPU only.
        update_proj_gap, scale_type: as in `APOLLO`, with its defaults.
        projection: "philox" (default) draws it from `seed` and the parameter's stream; "torch" like
            adafactor-8bit 0.1.9, with torch's generator from the seeds 0, 1, ... of parameters with
            two or more dimensions and a rank.
        state_format, param_format, full_precision, seed, overrides, min_numel, state_memory: as in
            `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's. Or `rank` meets beta1,
            add_eps, an eps1 whose square is 0 in float32, sharded columns or a GPU.
    """

    @arguments.documents_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float | None = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        beta1: float | None = None,
        beta2: float | None = None,
        relative_step: bool = True,
        scale_parameter: bool = True,
        decay_by: str = "lr",
        fira_margin: float | None = None,
        factored: bool = True,
        add_eps: bool = False,
        rank: int | str | None = None,
        update_proj_gap: int = 200,
        scale_type: str = "channel",
        projection: str = "philox",
        **options: Unpack[Options],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, maximize=maximize, foreach=foreach, **options)
        defaults |= {
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "beta1": beta1,
            "beta2": beta2,
            "relative_step": relative_step,
            "scale_parameter": scale_parameter,
            "decay_by": decay_by,
            "fira_margin": fira_margin,
            "factored": factored,
            "add_eps": add_eps,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale_type": scale_type,
            "projection": projection,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "relative_step", "scale_parameter", "factored", "add_eps")
        eps1, eps2 = arguments.pair("eps", group["eps"], optional=(0,))
        if not arguments.real("beta2_decay", group["beta2_decay"]) <= 0.0:
            raise ValueError(f"beta2_decay should be <= 0 but is: {group['beta2_decay']}")
        if eps1 is not None and not eps1 >= 0.0:
            raise ValueError(f"epsilon1 should be >= 0 but is: {eps1}")
        if not eps2 >= 0.0:
            raise ValueError(f"epsilon2 should be >= 0 but is: {eps2}")
        d, margin, decay_by = group["d"], group["fira_margin"], group["decay_by"]
        if d is not None and not arguments.real("d", d) >= 1.0:
            raise ValueError(f"Clipping threshold d should be >= 1 but is: {d}")
        if not arguments.real("weight_decay", group["weight_decay"]) >= 0.0:
            raise ValueError(f"weight_decay should be >= 0 but is: {group['weight_decay']}")
        for name in ("beta1", "beta2"):
            beta = group[name]
            if beta is not None and not 0.0 <= arguments.real(name, beta) < 1.0:
                raise ValueError(f"{name} should be in [0, 1) or None but is: {beta}")
        if decay_by not in _DECAY_BY:
            raise ValueError(f"decay_by should be one of {', '.join(_DECAY_BY)} but is: {decay_by}")
        if margin is not None and not arguments.real("fira_margin", margin) >= 0.0:
            raise ValueError(f"fira_margin should be >= 0 or None but is: {margin}")
        check_subspace(group["rank"], group["update_proj_gap"])
        check_projection(group["scale_type"], group["projection"])

    decides = ("beta1", "factored")
    _seeds: tuple[int, dict[int, int]] | None = None  # of so many parameters, by their numbers

    def lay_out_again(self) -> None:
        super().lay_out_again()
        self._seeds = None

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        kind = "adafactor" if group["factored"] and len(shape) > 1 else "adafactor_full"
        return kind + ("" if group["beta1"] is None else "_momentum")

    def subspace_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int, rank: int
    ) -> Layout:
        what = f"parameter {name!r}" if name else f"parameter {index}"
        if group["beta1"] is not None or group["add_eps"]:
            option = "add_eps=True" if group["beta1"] is None else f"beta1={group['beta1']}"
            raise ValueError(
                f"{what} has rank={group['rank']!r} and {option}, which Adafactor's subspace does "
                "not have; leave it out, take APOLLO, or step the parameter without a subspace "
                "(rank=None in its group)"
            )
        eps1 = group["eps"][0]
        if eps1 is not None and not eps1 * eps1 >= torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"{what} has rank={group['rank']!r} and eps[0]={eps1}, whose square is 0 in "
                "float32: a gradient of 0 would be divided by 0; take None (1e-8 under the root) "
                "in the group of matrices"
            )
        self.work_on(sharding.local(p).device)
        return lowrank_layout.layout_of(
            group, p, name, index, rank, rule=lowrank_layout.ADAFACTOR, number=self._seed_of(index)
        )

    def _seed_of(self, index: int) -> int:
        """The first seed of projection="torch": the parameter's place among those with two or more
        dimensions and a rank.
        """
        count = sum(len(group["params"]) for group in self.param_groups)
        if self._seeds is None or self._seeds[0] != count:
            ranked = {
                member.number: None
                for member in self.members()
                if len(member.p.shape) >= 2
                and self.param_groups[member.group].get("rank") is not None
            }
            self._seeds = (count, {number: seed for seed, number in enumerate(ranked)})
        return self._seeds[1][index]

    def work_on(self, device: torch.device) -> Any:
        if device.type not in ("cpu", "meta"):
            raise ValueError(
                f"Adafactor with a rank runs on the CPU only, but a parameter is on {device}; take "
                "APOLLO there, or rank=None"
            )
        return AdafactorWork

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        eps1, eps2 = group["eps"]

        def given(value: float | None) -> float:
            return -1.0 if value is None else float(value)

        if rule == lowrank_layout.ADAFACTOR:  # as for APOLLO, a learning rate of 1 writes N
            return [
                1.0,
                group["beta2_decay"],
                given(group["beta2"]),
                _SUBSPACE_EPS if eps1 is None else eps1 * eps1,
                float(group["update_proj_gap"]),
            ]

        return [
            arguments.number(group["lr"]),
            group["beta2_decay"],
            given(group["beta2"]),
            given(group["beta1"]),
            torch.finfo(torch.float32).eps if eps1 is None else eps1,
            eps2,
            given(group["d"]),
            group["weight_decay"],
            float(_DECAY_BY.index(group["decay_by"])),
            float(bool(group["relative_step"])),
            float(bool(group["scale_parameter"])),
            given(group["fira_margin"]),
            float(bool(group["add_eps"])),
        ]
