"""APOLLO, APOLLO-Mini and Fira: Adam in a subspace of each matrix."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import lowrank, lowrank_cuda, options, shard
from lowbit.batch import Batch
from lowbit.layout import Layout
from lowbit.optim import LowbitOptimizer, on_device

_PROJECTIONS = ("philox", "torch")


class _Subspace(LowbitOptimizer):
    """Matrices larger than `rank` on both sides in a subspace, all else by AdamW."""

    _fira = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        options.check_least(epsilon=defaults["eps"])
        options.check_betas(defaults["betas"])
        options.check_least(weight_decay=defaults["weight_decay"])
        rank = defaults["rank"]
        if not (rank is None or rank == "quarter" or (isinstance(rank, int) and rank >= 1)):
            raise ValueError(f"rank should be a positive int, 'quarter' or None but is: {rank}")
        if not defaults["update_proj_gap"] >= 1:
            raise ValueError(f"update_proj_gap should be >= 1 but is: {defaults['update_proj_gap']}")  # fmt: skip
        if not defaults["gamma"] >= 1.0:
            raise ValueError(f"gamma should be >= 1 but is: {defaults['gamma']}")
        super().__init__(params, defaults)

    def layout_of(
        self, group: Mapping[str, Any], p: Tensor, name: str | None, index: int
    ) -> Layout:
        rank = lowrank.rank_of(group, tuple(p.shape), name)
        if rank == 0:
            return super().layout_of(group, p, name, index)
        return lowrank.layout_of(group, p, name, index, rank, self._fira)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "adamw"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        moments = [float(beta1), float(beta2), group["eps"]]
        if rule == lowrank.INNER:
            return [1.0, *moments]  # it has no learning rate, but 0 would keep it from writing N
        return [options.number(lr), *moments, group["weight_decay"]]

    def _update(
        self,
        params: Iterable[tuple[int, Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> list[Batch]:
        matrices: list[tuple[int, Tensor]] = []
        others: list[tuple[int, Tensor]] = []
        for number, p in params:
            low = isinstance(self._layouts[p], lowrank.LowRankLayout)
            (matrices if low else others).append((number, p))
        batches = super()._update(others, grad_scale, found_inf)
        if matrices:
            self._update_matrices(matrices, grad_scale, found_inf)
        return batches

    @torch._disable_dynamo  # torch.compiler.disable, which would import the compiler with this module
    def _update_matrices(
        self,
        params: Iterable[tuple[int, Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        here: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, p in params:
            here.setdefault(shard.local(p).device, []).append((number, p))
        for device, members in here.items():
            kind = lowrank_cuda.CudaWork if device.type == "cuda" else lowrank.Work
            scale, skip = on_device(grad_scale, device), on_device(found_inf, device)
            groups = [(self.param_groups[number], p, self._layouts[p]) for number, p in members]
            looks = any(kind.looks(group, lay) for group, _, lay in groups)  # type: ignore[arg-type]
            if skip is not None and looks and float(skip) != 0.0:
                continue
            works = [kind(group, p, lay, self.state[p], scale, skip) for group, p, lay in groups]  # type: ignore[arg-type]
            numbers = {id(work): number for work, (number, _) in zip(works, members, strict=True)}
            lowrank.run(works, functools.partial(self._inner, numbers, skip))

    def _inner(
        self,
        numbers: Mapping[int, int],
        found_inf: Tensor | None,
        works: Sequence[lowrank.AnyWork],
    ) -> list[Batch]:
        batches: dict[Any, Batch] = {}
        for work in works:
            where = lowrank.inner_place(numbers[id(work)], work)
            if where not in batches:
                batches[where] = Batch(work.group, work.lay)
            lowrank.add_inner(batches[where], work)
        for where, batch in batches.items():
            table = self._plan((where, id(batch.rows[0][1])), batch)
            hyper = self.hyper(batch.group, batch.rule)
            batch.bind(table, hyper, found_inf=found_inf, seed=batch.group["seed"])
        return list(batches.values())


class APOLLO(_Subspace):
    """APOLLO (arXiv:2412.05270): AdamW's step lengths, channel by channel, from a random projection of the gradient.

    Moments are of the projected gradient: rank instead of min(R, C) of them for each channel, in `state_format`. The projection is drawn again where it
    is needed and never stored. Results do not depend on how rows are sharded, nor on the device.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, betas: as in Adam.
        eps: added to the root of the second moment, before bias correction.
        weight_decay: decoupled, applied after the update, as in the authors' code.
        rank: of the projection; "quarter": of the shorter side; None: none in this group. Parameters that are no matrices, that are not larger than
            `rank` on both sides, or that `wide` names take AdamW.
        scale: the update is multiplied by its root.
        scale_type: one step length for each "channel" (row where R >= C, else column) or for the "tensor".
        update_proj_gap: steps between two projections.
        scale_front: multiply before the norm is limited.
        disable_nl: let the update's norm grow by more than the factor gamma a step.
        projection: "philox": by `seed` and the parameter's stream; "torch": by torch's generator as the authors' code draws it, which goes by the
            parameter's number and may differ between torch versions.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, or a matrix whose columns are sharded.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | str | None = 256,
        scale: float = 1.0,
        scale_type: str = "channel",
        update_proj_gap: int = 200,
        scale_front: bool = False,
        disable_nl: bool = False,
        gamma: float = 1.01,
        projection: str = "philox",
        foreach: bool | None = None,
        maximize: bool = False,
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        if not scale >= 0.0:
            raise ValueError(f"scale should be >= 0 but is: {scale}")
        if scale_type not in ("channel", "tensor"):
            raise ValueError(f"scale_type should be 'channel' or 'tensor' but is: {scale_type}")
        if projection not in _PROJECTIONS:
            raise ValueError(
                f"projection should be one of {', '.join(_PROJECTIONS)} but is: {projection}"
            )
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, state_format=state_format, param_format=param_format,
            wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        defaults |= {
            "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "scale": scale,
            "scale_type": scale_type, "update_proj_gap": update_proj_gap, "scale_front": scale_front,
            "disable_nl": disable_nl, "gamma": gamma, "projection": projection,
        }  # fmt: skip
        super().__init__(params, defaults)


class APOLLOMini(APOLLO):
    """APOLLO-Mini: `APOLLO` of rank 1 with one step length for each tensor and `scale=128`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | str | None = 1,
        scale: float = 128.0,
        scale_type: str = "tensor",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay,
            rank=rank, scale=scale, scale_type=scale_type, **kwargs,
        )  # fmt: skip


class Fira(_Subspace):
    """Fira (arXiv:2410.01623): Adam in the leading subspace of the gradient, and what is outside it scaled alike.

    The subspace is found anew every `update_proj_gap` steps, from the whole gradient, which sharded parameters gather then; it is kept in the state.
    Other than that as `APOLLO`.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, betas, eps, weight_decay, rank, update_proj_gap, disable_nl, gamma: as in `APOLLO`; the norm that is limited is that of what is outside.
        alpha: multiplies what comes back from the subspace.
        maximize, foreach, state_format, param_format, wide, seed, overrides, min_numel, state_memory: as in `AdamW`.

    Raises:
        ValueError: an argument out of range, or a matrix whose columns are sharded.
    """

    _fira = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | str | None = 128,
        update_proj_gap: int = 200,
        alpha: float = 1.0,
        disable_nl: bool = False,
        gamma: float = 1.01,
        foreach: bool | None = None,
        maximize: bool = False,
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        if not alpha >= 0.0:
            raise ValueError(f"alpha should be >= 0 but is: {alpha}")
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, state_format=state_format, param_format=param_format,
            wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        defaults |= {
            "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank,
            "update_proj_gap": update_proj_gap, "alpha": alpha, "disable_nl": disable_nl,
            "gamma": gamma,
        }  # fmt: skip
        super().__init__(params, defaults)
