"""What the optimizers' arguments have in common: checks in torch's words, and the entries of every group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from lowbit.overrides import check as check_overrides
from lowbit.overrides import check_together

# Group entries that say how state is laid out: the live optimizer's, whatever a loaded state dict says.
STRUCTURE = (
    "state_format", "param_format", "wide", "overrides", "min_numel", "rank", "decoupled_weight_decay"
)  # fmt: skip


def shared(
    lr: float | Tensor,
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
) -> dict[str, Any]:
    """Group entries of every lowbit optimizer, checked, and `state_memory`.

    Raises:
        TypeError, ValueError, RuntimeError: as torch's optimizers raise them, and as `check_group` does.
    """
    group = {
        "lr": lr,
        "maximize": maximize,
        "foreach": foreach,
        "capturable": capturable,
        "differentiable": differentiable,
        "fused": fused,
        "state_format": state_format,
        "param_format": param_format,
        "wide": (wide,) if isinstance(wide, str) else wide,
        "seed": seed,
        "overrides": overrides,
        "min_numel": min_numel,
        "lowbit_version": 1,
    }
    check_group("the optimizer", group)
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if differentiable:
        raise ValueError(
            "differentiable=True is not supported: the state is not differentiable. Use torch.optim for that"
        )
    if fused and foreach:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    return {**group, "state_memory": state_memory}  # of the whole optimizer: it takes it out again


def check_group(what: str, group: Mapping[str, Any]) -> None:
    """Checks what is given in one place, for all parameters or for a group; text for a learning rate would otherwise be found out in the first step.

    Raises:
        TypeError: one of the options is of no use.
        ValueError: they contradict each other, or one is not for a group.
    """
    lr = group.get("lr", 0.0)
    if lr is None or isinstance(lr, str):
        raise TypeError(f"lr should be a number or a tensor but is: {lr!r}")
    if "state_memory" in group:
        raise ValueError(
            "state_memory is for a whole optimizer, not for a group of it: hand it to the optimizer"
        )
    seed = group.get("seed", 0)
    if not isinstance(seed, Integral):
        raise TypeError(f"seed should be an int but is: {seed!r}")
    if not -(1 << 63) <= int(seed) < 1 << 63:
        raise ValueError(f"seed should fit into 64 bits with a sign but is: {seed}")
    wide = group.get("wide", ())
    if not isinstance(wide, bool | str | Sequence):
        raise TypeError(f"wide should be patterns of names, or a bool, but is: {wide!r}")
    check_overrides(group.get("overrides") or {})
    check_together(what, group)


def check_betas(betas: Sequence[float | Tensor], count: int = 2) -> None:
    """TypeError unless there are `count` betas, ValueError unless every one is in [0, 1)."""
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != count:
        raise TypeError(f"betas should be {count} numbers but is: {betas!r}")
    for i, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def check_least(least: float = 0.0, **values: float) -> None:
    """ValueError unless every value is at least `least`."""
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"Invalid {name} value: {value}")


def number(lr: float | Tensor) -> float:
    """What stands in `hyper` for a learning rate: 0 for a tensor, which the operator takes beside it."""
    return 0.0 if isinstance(lr, Tensor) else lr
