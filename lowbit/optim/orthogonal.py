"""Momentum that is orthogonalized: what Muon and MuonWithAdamW share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.config import arguments, muon
from lowbit.config.muon import MuonOptions
from lowbit.optim.matrices import MatrixOptimizer
from lowbit.state import muon_layout
from lowbit.state.layout import Layout
from lowbit.state.muon_layout import MuonLayout
from lowbit.step.group import StepGroup
from lowbit.step.muon import Matrix, run
from lowbit.step.numbers import on_device


class OrthogonalOptimizer(MatrixOptimizer):
    """The base of Muon and MuonWithAdamW: groups with `use_muon=False` are stepped by AdamW,
    all others by Muon.
    """

    decides = ("normuon_beta2",)

    def __init__(self, params: Any, rule: dict[str, Any], options: MuonOptions) -> None:
        """
        Args:
            rule: the arguments of torch.optim.Muon, and group entries of the optimizer's own.
            options: all others, of which some may be missing.
        """
        given: dict[str, Any] = dict(options)
        own = {key: given.pop(key, default) for key, default in muon.OWN.items()}
        self._owners: dict[Any, tuple[int, ...]] = {}
        super().__init__(
            params, {**arguments.group_defaults(self, rule["lr"], **given), **rule, **own}
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        if group.get("use_muon", True):
            muon.check(group)
            super().check_options(group)
            return
        super().check_options(group)
        arguments.check_betas(group["betas"])
        arguments.check_least(epsilon=group["eps"], weight_decay=group["weight_decay"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:  # AdamW waits for flat shards to be bound, which Muon could not use
            for i, p in enumerate(group["params"] if group.get("use_muon", True) else ()):
                muon_layout.refuse_flat(p, f"parameter {i} of group {len(self.param_groups) - 1}")
        except ValueError:
            self.param_groups.pop()
            raise

    add_param_group.__doc__ = MatrixOptimizer.add_param_group.__doc__

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> Layout:
        if not group.get("use_muon", True):
            return super().layout_of(group, p, name, index)
        return muon_layout.layout_of(group, p, name, index)

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        # it has no learning rate, but 0 would keep it from writing
        if rule == muon_layout.MOMENTUM:
            return [1.0, float(group["momentum"]), float(bool(group["nesterov"]))]
        lr = arguments.number(group["lr"])
        if rule == muon_layout.STEP:
            cautious = float(bool(group["cautious_weight_decay"]))
            return [lr, float(group["weight_decay"]), 1.0, cautious]
        beta1, beta2 = group["betas"]
        return [lr, float(beta1), float(beta2), group["eps"], group["weight_decay"]]

    def _update_matrices(
        self,
        params: Iterable[tuple[int, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        here: dict[torch.device, list[Matrix]] = {}
        for number, p in params:
            lay: Any = self.layouts[p]
            value = self.local_shard(p, lay)
            owners = self._owners_of(p)
            group, state = self.param_groups[number], self.state[p]
            made = Matrix(number, group, p, lay, state, owners)  # type: ignore[arg-type]
            if value.device.type != "cpu":
                made.skip = on_device(found_inf, value.device)
            here.setdefault(value.device, []).append(made)
        for device, matrices in here.items():
            skip = on_device(found_inf, device)
            on_host = skip is not None and device.type == "cpu"
            skipped = on_host and float(skip) != 0.0  # type: ignore[arg-type]

            def bind(
                step_group: StepGroup, where: Any, ratio: float | None, skip: Tensor | None = skip
            ) -> None:
                table = self.plan_of(("muon", *where), step_group)
                self._bind_half(step_group, table, ratio, grad_scale, skip)

            run(matrices, bind, skipped)

    def _owners_of(self, p: Any) -> tuple[int, ...]:
        """The rank of its process group that orthogonalizes each matrix;
        none if no other rank has parts of them.

        It follows from all parameters of the optimizer, whichever have a gradient,
        so it is the same in every step.
        """
        if not self._owners:
            together: dict[Any, list[tuple[Any, MuonLayout]]] = {}
            for _, q, lay in self.laid_out():
                self._owners[q] = ()
                if isinstance(lay, MuonLayout) and lay.home:
                    self._owners[q] = lay.home.owners
                elif isinstance(lay, MuonLayout) and lay.spread:
                    together.setdefault(lay.group, []).append((q, lay))
            for several in together.values():
                costs = [lay.cost for _, lay in several for _ in range(lay.count)]
                ranks = len(several[0][1].spread.of)  # type: ignore[union-attr]
                found = iter(sharding.owners(costs, ranks))
                for q, lay in several:
                    self._owners[q] = tuple(itertools.islice(found, lay.count))
        return self._owners[p]

    def lay_out_again(self) -> None:
        super().lay_out_again()
        self._owners.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._owners = {}

    def _bind_half(
        self,
        step_group: StepGroup,
        table: Tensor,
        ratio: float | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Gives a step group its operator call: the momentum's,
        or the step's with the ratio of its learning rate.

        Only the first takes what is to be done to gradients, and only the second the learning rate.
        """
        if ratio is not None:
            hyper, options = self.call_options(step_group, None, found_inf)
            hyper[2] = ratio
            step_group.bind(table, hyper, **{**options, "maximize": False})
        else:
            hyper, options = self.call_options(step_group, grad_scale, found_inf)
            step_group.bind(table, hyper, **{**options, "lr": None})
