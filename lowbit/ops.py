"""The operators of csrc/ops.cpp. The only file that touches `torch.ops`."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _load() -> None:
    spec = importlib.util.find_spec("lowbit._ops")
    if spec is None or spec.origin is None:
        raise ImportError(
            "lowbit's operators are not built: no _ops.so beside the package. "
            "Build with `pip install --no-build-isolation .` after installing torch."
        )
    torch.ops.load_library(spec.origin)


_load()
_ops = torch.ops.lowbit


@functools.cache
def _registered() -> dict[str, Any]:
    return json.loads(_ops.catalog())


def catalog() -> dict[str, Any]:
    """Everything that is registered.

    Returns:
        `state`: formats of optimizer state (`name`, `index`, `bits`, `block`, `scaled`, `signed`, `dtype`);
        `rules`: update rules (`name`, `slots`, `hyper`); `param`: parameter formats (`name`, `index`, `dtype`);
        `isas`: instruction sets that this processor runs, best last; `isa`: the one in use.
    """
    return json.loads(_ops.catalog())


@functools.cache
def state_format(name: str) -> dict[str, Any]:
    """The catalog's entry of a state format; ValueError with the names there are."""
    for entry in _registered()["state"]:
        if entry["name"] == name:
            return entry
    names = ", ".join(entry["name"] for entry in _registered()["state"])
    raise ValueError(f"no state format is named {name!r}; there are {names}")


@functools.cache
def param_format(name: str) -> dict[str, Any]:
    """The catalog's entry of a parameter format; ValueError with the names there are."""
    for entry in _registered()["param"]:
        if entry["name"] == name:
            return entry
    names = ", ".join(entry["name"] for entry in _registered()["param"])
    raise ValueError(f"no parameter format is named {name!r}; there are 'auto', {names}")


@functools.cache
def rule(name: str) -> dict[str, Any]:
    """The catalog's entry of an update rule."""
    return next(entry for entry in _registered()["rules"] if entry["name"] == name)


def step(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Sequence[Tensor],
    steps: Sequence[Tensor],
    plan: Tensor,
    hyper: Sequence[float],
    *,
    lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    seed: int = 0,
) -> None:
    """One step of `rule` over local, contiguous tensors of one device, in place.

    Args:
        state: for each parameter and slot of the rule, its values, and after them its scales where the format has them.
        steps: one float32 each, incremented; on the CPU for CPU parameters, else on their device.
        plan: int64 CPU [n, 16], a row for each parameter as lowbit/layout.py writes it.
        hyper: as the catalog lists them for the rule; `lr`, a tensor of one element, takes the place of `hyper[0]`.
        grad_scale: gradients are divided by it. found_inf: where it is not 0 nothing happens at all.
    """
    _ops.step(
        rule, params, grads, state, steps, plan, hyper,
        lr=lr, grad_scale=grad_scale, found_inf=found_inf, maximize=maximize, seed=seed,
    )  # fmt: skip


def encode(x: Tensor, format: str, block: int) -> tuple[Tensor, Tensor]:
    """float32 [rows, cols], contiguous -> codes [rows, bytes] and float32 scales [rows, ceil(cols / block)]."""
    return _ops.encode(x, format, block)


def decode(codes: Tensor, scales: Tensor, format: str, block: int, cols: int) -> Tensor:
    """Codes and scales -> float32 [rows, cols]."""
    return _ops.decode(codes, scales, format, block, cols)


def set_isa(name: str) -> None:
    """Force one of `catalog()["isas"]`, as LOWBIT_ISA in the environment does at start. Results are the same bits; speed is not."""
    _ops.set_isa(name)


@torch.library.register_fake("lowbit::step")
def _(
    rule,
    params,
    grads,
    state,
    steps,
    plan,
    hyper,
    *,
    lr=None,
    grad_scale=None,
    found_inf=None,
    maximize=False,
    seed=0,
):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("lowbit::encode")
def _(x, format, block):  # type: ignore[no-untyped-def]
    entry = state_format(format)
    rows, cols = x.shape
    codes = x.new_empty((rows, -(-cols * entry["bits"] // 8)), dtype=getattr(torch, entry["dtype"]))
    return codes, x.new_empty((rows, -(-cols // block)))


@torch.library.register_fake("lowbit::decode")
def _(codes, scales, format, block, cols):  # type: ignore[no-untyped-def]
    return codes.new_empty((codes.shape[0], cols), dtype=torch.float32)
