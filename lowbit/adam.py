"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit import options
from lowbit.optim import LowbitOptimizer


class Adam(LowbitOptimizer):
    """Adam (arXiv:1412.6980) with state in few bits and, for bfloat16 parameters, no master copy.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts. Names (`model.named_parameters()`, `lowbit.param_groups(model)`) make random bits,
            `load_optimizer` and checkpoints of torch.distributed.checkpoint independent of parameter order; `load_state_dict` goes by order, as torch's.
        lr: learning rate, a float or a tensor of one element.
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: added to the gradient (L2), or decoupled_weight_decay=True: applied to the weights before the update, as in AdamW.
        amsgrad: keep the largest second moment, in a third state tensor.
        maximize: ascend instead.
        foreach, fused: accepted as torch has them and ignored; there is one implementation, and it is fused.
        capturable: accepted as torch has it; the CUDA step never waits for the device and can be captured either way.
        differentiable: not supported; True raises.
        state_format: "8bit" (dynamic8, 1 + 4/256 bytes a value) or another preset, a format of `lowbit.catalog()`, a `lowbit.scaled(...)`, or a
            mapping {"exp_avg": ..., "exp_avg_sq": ...} of them. "factored" keeps exp_avg_sq as row and column means (4-bit Factor).
        param_format: "auto": stochastic rounding for 16-bit parameters, plain for float32; or a format of `lowbit.catalog()["param"]`.
        wide: name patterns (fnmatch) whose parameters keep float32 state, or True for all of a group. Parameters of fewer than 4096 elements, fewer
            than 2 dimensions or rows shorter than 16 always do.
        seed: of the random bits.
        overrides: other `state_format`, `param_format`, `wide` or `min_numel` for parameters of some names; see `lowbit.override`.
        min_numel: parameters of fewer elements keep float32 state, instead of 4096 or of what `state_format` says. Options but the
            next are per group.
        state_memory: where state lies that has something for each value of a parameter on a GPU: "device", the GPU's own memory; "pinned", memory of
            the host that the GPU steps in place over the bus; or "managed", pages that are on the GPU as long as it has room. The results are the same
            bits, and so are checkpoints, which do not know of it. What is on the CPU stays there. docs/cuda.md says what it costs.

    Raises:
        ValueError: a hyperparameter out of range (torch's words), or a parameter that cannot be served, with its name and numbers.
    """

    def __init__(
        self,
        params: Any,
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
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        defaults = options.shared(
            lr, maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable,
            fused=fused, state_format=state_format, param_format=param_format, wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
        options.check_least(epsilon=eps)
        options.check_betas(betas)
        options.check_least(weight_decay=weight_decay)
        defaults |= {
            "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    decides = ("amsgrad", "decoupled_weight_decay")

    def rule(self, group: Mapping[str, Any], shape: Sequence[int]) -> str:
        kind = "adamw" if group["decoupled_weight_decay"] else "adam"
        return kind + ("_amsgrad" if group["amsgrad"] else "")

    def hyper(self, group: Mapping[str, Any], rule: str) -> list[float]:
        beta1, beta2 = group["betas"]
        return [
            options.number(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"]
        ]  # fmt: skip


class AdamW(Adam):
    """AdamW (arXiv:1711.05101): `Adam` with decoupled weight decay, `weight_decay=1e-2` by default."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_format: str | Mapping[str, Any] = "8bit",
        param_format: str = "auto",
        wide: bool | Sequence[str] = (),
        seed: int = 0,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        min_numel: int | None = None,
        state_memory: str = "device",
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=True, state_format=state_format, param_format=param_format,
            wide=wide, seed=seed, overrides=overrides, min_numel=min_numel,
            state_memory=state_memory,
        )  # fmt: skip
