"""The operators of csrc/ops*.cpp. The only file that touches `torch.ops`."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
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
    """What the operators were built with; `lowbit.catalog` says what is in it."""
    return json.loads(_ops.catalog())


def entries(kind: str) -> Sequence[Mapping[str, Any]]:
    """The catalog's entries of a kind: state, rules or param. Shared: only to be read."""
    return _registered()[kind]


@functools.cache
def names(kind: str) -> frozenset[str]:
    """The names of the catalog's entries of a kind: state, rules or param."""
    return frozenset(entry["name"] for entry in _registered()[kind])


@functools.cache
def state_format(name: str) -> dict[str, Any]:
    """The catalog's entry of a state format; ValueError with the names there are."""
    for entry in _registered()["state"]:
        if entry["name"] == name:
            return entry
    names = ", ".join(entry["name"] for entry in _registered()["state"])
    raise ValueError(f"no state format is named {name!r}; there are {names}")


@functools.cache
def has_zero(name: str) -> bool:
    """Whether a zero beside other values stays zero in a state format."""
    entry = state_format(name)
    if not entry["scaled"]:
        return True
    x = torch.zeros(1, entry["block"], device="cpu")
    x[0, 0] = 1.0
    codes, scales = encode(x, name, entry["block"])
    return bool(decode(codes, scales, name, entry["block"], entry["block"])[0, 1] == 0)


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
    phase: int = 0,
    scratch: Sequence[Tensor] = (),
) -> None:
    """One step of `rule` over local, contiguous tensors of one device, in place.

    Args:
        state: for each parameter, the tensors of `Layout.entries()`.
        steps: one float32 each, incremented in phase 0; on the CPU for CPU parameters, else on their device.
        plan: int64 CPU [n, PLAN_COLUMNS], a row for each parameter as lowbit/layout.py writes it.
        phase: 0 .. `Layout.phases`. Each but the last measures something into `scratch`, which the caller reduces over the shards before the
            next; the last updates.
        scratch: of `scratch()`; empty where there is one phase.
        hyper: as the catalog lists them for the rule; `lr`, a tensor of one element, takes the place of `hyper[0]`.
        grad_scale: gradients are divided by it. found_inf: where it is not 0 nothing happens at all.
    """
    _ops.step(
        rule, params, grads, state, steps, scratch, plan, hyper,
        lr=lr, grad_scale=grad_scale, found_inf=found_inf, maximize=maximize, seed=seed,
        phase=phase,
    )  # fmt: skip


# Steps over the same tensors: all but parameters and gradients is handed over once (csrc/ops_prepared.cpp).
step_prepare = _ops.step_prepare  # (rule, params, state, steps, plan) -> number
step_discard = _ops.step_discard  # (number)
step_take = _ops.step_take  # (number, params, grads) -> False where tensors are not as they were


def step_prepared(
    number: int,
    hyper: Sequence[float],
    phases: int,
    *,
    phase: int = 0,
    scratch: Sequence[Tensor] = (),
    **options: Any,
) -> None:
    """`step` with the gradients that were taken, which are let go behind the last of its phases."""
    _ops.step_prepared(number, scratch, hyper, phase=phase, last=phase >= phases, **options)


# The passes of a low-rank step over what is here of one matrix on the CPU, for lowbit/lowrank.py: docs/lowrank.md.
projection = _ops.projection
singular_vectors = _ops.singular_vectors
project_rows = _ops.project_rows
column_most = _ops.column_most
project_columns = _ops.project_columns
column_values = _ops.column_values
channel_scales = _ops.channel_scales
squares = _ops.squares
tensor_scale = _ops.tensor_scale
apollo_norm = _ops.apollo_norm
fira_norm = _ops.fira_norm
limit = _ops.limit
apollo_step = _ops.apollo_step
fira_step = _ops.fira_step
# And over many matrices on a GPU, for lowbit/lowrank_cuda.py.
lowrank_pass = _ops.lowrank_pass  # (pass, read, written, plan, hyper, table, grad_scale, found_inf)
lowrank_room = _ops.lowrank_room  # () -> bytes of the table for each matrix


def accumulate(
    held: Sequence[Tensor],
    beside: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: Tensor,
    format: str,
    *,
    scale: float = 1.0,
    seed: int = 0,
) -> None:
    """held += scale * grads in float32, stored in a parameter format, in place; local, contiguous tensors of one device.

    Args:
        beside: what the format keeps beside each buffer; empty where it keeps nothing.
        plan: int64 CPU [n, 6]: rows, columns, columns of the whole gradient, global index of the first element, stream of random bits, additions
            so far.
    """
    _ops.accumulate(held, beside, grads, plan, format, scale, seed)


def exact_powers(grads: Sequence[Tensor], power: int) -> Tensor:
    """The sum of |g| (power 1) or g * g (2), each rounded to float32, over contiguous CPU tensors: int64 [SUM_WORDS], exact. Ranks add words."""
    return _ops.exact_powers(grads, power)


SUM_WORDS = 19  # of csrc/core/exact_sum.h, the last of which counts infinities, and a count of NaN

SCRATCH_DTYPES = (
    torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int32, torch.float32
)  # fmt: skip


def scratch(rule: str, plan: Tensor, device: torch.device) -> list[Tensor]:
    """The workspace of a step of several phases: exact sums of tensors, rows and columns (add over shards), maxima of rows, columns and cut blocks
    as bits (largest over shards), and floats that stay here. Holds nothing between steps."""
    return [
        torch.zeros(size, dtype=dtype, device=device)
        for size, dtype in zip(scratch_sizes(rule, plan), SCRATCH_DTYPES, strict=True)
    ]


def scratch_sizes(rule: str, plan: Tensor) -> list[int]:
    """The lengths of the tensors of `scratch`."""
    return _ops.scratch_sizes(rule, plan)


def allocate(size: Sequence[int], dtype: torch.dtype, device: torch.device, memory: str) -> Tensor:
    """A tensor of a GPU, not empty and not filled, in memory that is not the GPU's own: "pinned" or "managed".

    Raises:
        RuntimeError: the memory cannot be had, or lowbit was built without CUDA.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _ops.allocate(size, str(dtype).removeprefix("torch."), index, memory)


def encode(x: Tensor, format: str, block: int) -> tuple[Tensor, Tensor]:
    """float32 [rows, cols], contiguous -> codes [rows, ceil(cols * bits / 8)] and scales [rows, ceil(cols / block) * scale_numbers], in the dtypes of
    `state_format(format)`."""
    return _ops.encode(x, format, block)


def decode(codes: Tensor, scales: Tensor, format: str, block: int, cols: int) -> Tensor:
    """Codes and scales -> float32 [rows, cols]."""
    return _ops.decode(codes, scales, format, block, cols)


def encode_given(x: Tensor, most: Tensor, format: str) -> Tensor:
    """float32 [rows, cols] and the largest magnitude that each value's scale covers -> codes [rows, bytes]. On the CPU."""
    return _ops.encode_given(x, most, format)


def decode_given(codes: Tensor, most: Tensor, format: str) -> Tensor:
    """The inverse of `encode_given`."""
    return _ops.decode_given(codes, most, format)


def join(stored: Tensor, extra: Tensor | None, format: str) -> Tensor:
    """The float32 values of a contiguous parameter and what its format keeps beside it. On the CPU."""
    return _ops.join(stored, extra, format)


def split(x: Tensor, format: str, *, seed: int = 0, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Contiguous float32 values -> (the parameter, what its format keeps beside it, empty where nothing). On the CPU."""
    return _ops.split(x, format, seed, stream)


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
    scratch,
    plan,
    hyper,
    *,
    lr=None,
    grad_scale=None,
    found_inf=None,
    maximize=False,
    seed=0,
    phase=0,
):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("lowbit::accumulate")
def _(held, beside, grads, plan, format, scale, seed):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("lowbit::exact_powers")
def _(grads, power):  # type: ignore[no-untyped-def]
    return grads[0].new_empty((SUM_WORDS,), dtype=torch.int64)


@torch.library.register_fake("lowbit::allocate")
def _(size, dtype, device, memory):  # type: ignore[no-untyped-def]
    return torch.empty(size, dtype=getattr(torch, dtype), device=torch.device("cuda", device))


def _row_codes(entry: dict[str, Any], cols: int) -> int:
    return -(-cols * entry["bits"] // 8)


@torch.library.register_fake("lowbit::encode")
def _(x, format, block):  # type: ignore[no-untyped-def]
    entry = state_format(format)
    rows, cols = x.shape
    codes = x.new_empty((rows, _row_codes(entry, cols)), dtype=getattr(torch, entry["dtype"]))
    width = -(-cols // block) * entry["scale_numbers"]
    return codes, x.new_empty((rows, width), dtype=getattr(torch, entry["scale_dtype"]))


@torch.library.register_fake("lowbit::decode")
def _(codes, scales, format, block, cols):  # type: ignore[no-untyped-def]
    return codes.new_empty((codes.shape[0], cols), dtype=torch.float32)


@torch.library.register_fake("lowbit::encode_given")
def _(x, most, format):  # type: ignore[no-untyped-def]
    entry = state_format(format)
    width = _row_codes(entry, x.shape[1])
    return x.new_empty((x.shape[0], width), dtype=getattr(torch, entry["dtype"]))


@torch.library.register_fake("lowbit::decode_given")
def _(codes, most, format):  # type: ignore[no-untyped-def]
    return torch.empty_like(most)


@torch.library.register_fake("lowbit::join")
def _(stored, extra, format):  # type: ignore[no-untyped-def]
    return torch.empty_like(stored, dtype=torch.float32)


@torch.library.register_fake("lowbit::split")
def _(x, format, seed, stream):  # type: ignore[no-untyped-def]
    info = param_format(format)
    stored = torch.empty_like(x, dtype=getattr(torch, info["dtype"]))
    if not info["extra"]:
        return stored, x.new_empty((0,), dtype=torch.uint8)
    dtype = getattr(torch, info["extra"])
    sizes = (*x.shape, info["extra_bytes"]) if dtype == torch.uint8 else x.shape
    return stored, x.new_empty(sizes, dtype=dtype)
