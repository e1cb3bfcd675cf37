"""Lion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.optim.optimizer import LowbitOptimizer


class Lion(LowbitOptimizer):
    """Lion (arXiv:2302.06675): steps by the sign of an interpolated momentum,
    which is the only state.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts.
        lr: learning rate, about a tenth of AdamW's; 1e-4 by default.
        betas: weight of the momentum in the step, and its decay; (0.9, 0.99) by default.
        weight_decay: decoupled, about ten times AdamW's; 0 by default.
        cautious: True moves only weights whose step agrees in sign with the gradient, and these
            further, by 1 over their share (arXiv:2411.16085); False by default.
        maximize, foreach, state_format, param_format, full_precision, seed, overrides, min_numel,
            state_memory: as in `Adam`.

    Raises:
        ValueError: an argument is out of range; the messages are torch's.
    """

    @arguments.documents_options(AllOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        cautious: bool = False,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults = arguments.group_defaults(self, lr, **options)
        defaults |= {"betas": betas, "weight_decay": weight_decay, "cautious": cautious}
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "cautious")
        arguments.check_betas(group["betas"])
        arguments.check_least(weight_decay=group["weight_decay"])

    decides = ("cautious",)

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        return "cautious_lion" if group.get("cautious") else "lion"

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        return [arguments.number(group["lr"]), *group["betas"], group["weight_decay"]]
