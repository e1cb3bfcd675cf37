"""APOLLO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.subspace import SubspaceOptimizer

_PROJECTIONS = ("philox", "torch")


def check_projection(scale_type: str, projection: str) -> None:
    """Checks how a projection is drawn and how it scales.

    Raises:
        ValueError: one is unknown.
    """
    if scale_type not in ("channel", "tensor"):
        raise ValueError(f"scale_type should be 'channel' or 'tensor' but is: {scale_type}")
    if projection not in _PROJECTIONS:
        raise ValueError(
            f"projection should be one of {', '.join(_PROJECTIONS)} but is: {projection}"
        )


class APOLLO(SubspaceOptimizer):
    """APOLLO (arXiv:2412.05270): AdamW's step lengths, channel by channel,
    from a random projection of the gradient.

    The moments are the projected gradient's, in `state_format`: `rank` instead of min(R, C) values
    per channel. The projection is never stored, but drawn again for each step. Results depend
    neither on how rows are sharded nor on the device.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr, betas: as in `Adam`, with its defaults.
        eps: added to the root of the second moment, before bias correction; 1e-6 by default.
        weight_decay: decoupled, applied after the update, as in the authors' code; 0 by default.
        rank: of the projection; 256 by default. "quarter" is a quarter of the shorter side; None
            uses no subspace in this group. AdamW steps parameters that are not matrices, are not
            larger than `rank` on both sides, or are kept in full precision by `full_precision` or
            `overrides`.
        scale: the update is multiplied by its square root; 1 by default.
        scale_type: one step length for each "channel" (default; a row if R >= C, else a column) or
            for the "tensor".
        update_proj_gap: steps between two projections; 200 by default.
        scale_front: True scales the update before its norm is limited; False by default.
        disable_nl: True lets the update's norm grow by more than the factor gamma per step;
            False by default.
        gamma: largest growth factor of the update's norm; 1.01 by default, at least 1.
        projection: "philox" (default) draws it from `seed` and the parameter's stream. "torch"
            draws it with torch's generator like the authors' code; it depends on the parameter's
            number and may differ between torch versions.
        maximize, foreach, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range, or a matrix has sharded columns.
    """

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
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
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "scale": scale,
            "scale_type": scale_type,
            "update_proj_gap": update_proj_gap,
            "scale_front": scale_front,
            "disable_nl": disable_nl,
            "gamma": gamma,
            "projection": projection,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "scale_front", "disable_nl")
        if not arguments.real("scale", group["scale"]) >= 0.0:
            raise ValueError(f"scale should be >= 0 but is: {group['scale']}")
        check_projection(group["scale_type"], group["projection"])
