"""Adam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config import arguments
from lowbit.config.arguments import Options
from lowbit.optim.optimizer import LowbitOptimizer


class Adam(LowbitOptimizer):
    """Adam (arXiv:1412.6980) with low-bit state and, for bfloat16 parameters, no master copy.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts. With names
            (`model.named_parameters()`, `lowbit.param_groups(model)`), random bits,
            `load_optimizer` and torch.distributed.checkpoint do not depend on parameter order.
            `load_state_dict` matches by name if both sides have the same names, else by order, as
            torch.
        lr: learning rate, a float or a tensor of one element; 1e-3 by default.
        betas: decay of the running averages of the gradient and its square;
            (0.9, 0.999) by default.
        eps: added to the denominator; 1e-8 by default.
        weight_decay: added to the gradient (L2); 0 by default.
        amsgrad: keeps the largest second moment, in a third state tensor; False by default.
        maximize: maximizes the objective instead; False by default.
        foreach, fused: accepted for torch's signature and ignored: the only implementation is
            fused.
        capturable: accepted for torch's signature;
            the CUDA step never waits for the device and can always be captured.
        differentiable: not supported; True raises.
        decoupled_weight_decay: True applies weight decay to the weights before the update,
            as in AdamW. `AdamW` sets it.
        cautious: True moves only weights whose first moment agrees in sign with the gradient, and
            these further, by 1 over their share (arXiv:2411.16085). It takes a pass over the
            gradients and a reduction of its own; False by default.
        state_format: "8bit" by default (dynamic8, 1 + 4/256 bytes per value). It may be another
            preset, a format of `lowbit.catalog()`, a `lowbit.scaled(...)`, or a mapping {"exp_avg":
            ..., "exp_avg_sq": ...} of these. "factored" keeps exp_avg_sq as row and column means
            (4-bit Factor).
        param_format: "auto" (default) rounds 16-bit parameters stochastically and stores float32 as
            is; or a format of `lowbit.catalog()["param"]`.
        full_precision: name patterns (fnmatch) of parameters that keep float32 state, or True for
            all of a group; () by default. Parameters of fewer than 4096 elements, fewer than 2
            dimensions or rows shorter than 16 always do.
        seed: of the random bits; 0 by default.
        overrides: other `state_format`, `param_format`, `full_precision` or `min_numel` by
            parameter name; see `lowbit.override`.
        min_numel: parameters of fewer elements keep float32 state. None (default) uses the
            threshold of `state_format`, or 4096. All options except `state_memory` are per group.
        state_memory: where large state tensors of GPU parameters are allocated. "device" (default)
            is the GPU's own memory. "pinned" is host memory that the GPU updates in place over the
            bus. "managed" keeps pages on the GPU while it has room. Results and checkpoints have
            the same bits. State of CPU parameters stays on the CPU. docs/cuda.md gives the cost.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: a hyperparameter is out of range (torch's messages), or a parameter is not
            supported; the message has its name and numbers.
    """

    @arguments.documents_options(Options)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        cautious: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = arguments.group_defaults(
            self,
            lr,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **options,
        )
        defaults |= {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled_weight_decay,
            "cautious": cautious,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Mapping[str, Any]) -> None:
        super().check_options(group)
        arguments.check_flags(group, "amsgrad", "decoupled_weight_decay", "cautious")
        arguments.check_least(epsilon=group["eps"])
        arguments.check_betas(group["betas"])
        arguments.check_tensors(group["lr"], group["betas"], group["foreach"], group["capturable"])
        arguments.check_least(weight_decay=group["weight_decay"])

    decides = ("amsgrad", "decoupled_weight_decay", "cautious")

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        kind = "adamw" if group["decoupled_weight_decay"] else "adam"
        kind += "_amsgrad" if group["amsgrad"] else ""
        return f"cautious_{kind}" if group.get("cautious") else kind

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        beta1, beta2 = group["betas"]
        return [
            arguments.number(group["lr"]),
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
        ]
