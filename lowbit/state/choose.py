"""What a user's options mean for one parameter: its rule, its slots,
and whether its state stays in full precision.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config.hints import did_you_mean
from lowbit.config.overrides import clean_name
from lowbit.config.presets import FACTORED, is_named, scaled, slot_formats, slow_mean
from lowbit.state.slot import Slot

_BY_DTYPE = ("auto", "nearest")  # what stands for a parameter format of each dtype


def is_full_precision(
    shape: Sequence[int],
    name: str | None,
    full_precision: bool | Sequence[str],
    min_numel: int | None = None,
) -> bool:
    """Whether a parameter of this global shape and name keeps full-precision state.

    It does if it has too few dimensions, fewer than `min_numel` elements (None: the policy's
    threshold) or rows that are too short, or if `full_precision` names it.
    `lowbit.catalog()["thresholds"]` has the numbers.
    """
    limits = ops.policy("thresholds")
    if len(shape) < limits["min_dims"] or math.prod(shape[1:]) < limits["min_cols"]:
        return True
    if math.prod(shape) < (limits["min_numel"] if min_numel is None else min_numel):
        return True
    return names_full_precision(name, full_precision)


def names_full_precision(name: str | None, full_precision: bool | Sequence[str]) -> bool:
    """Whether `full_precision` names the parameter, whatever its shape."""
    if isinstance(full_precision, bool):
        return full_precision
    patterns = (full_precision,) if isinstance(full_precision, str) else full_precision or ()
    return any(fnmatch.fnmatch(clean_name(name or ""), pattern) for pattern in patterns)


def chosen_of(
    rule: str,
    part: sharding.Part,
    options: Mapping[str, Any],
    name: str | None,
    param_format: str = "float32",
) -> tuple[dict[str, dict[str, Any]], dict[str, bool]]:
    """The format of each state of a rule by a parameter's options,
    and whether the state stays in full precision.

    A copy of weights has at least the precision of `param_format`, and float32 for parameters in
    full precision. A mean over thousands of steps has what `slow_mean` says. Both only where
    `state_format` does not name the state.
    """
    own = options["min_numel"]
    narrow = param_format.removesuffix("_stochastic") == "bfloat16"
    if narrow and not is_full_precision(part.shape, name, options["full_precision"], own):
        weights = scaled("bfloat16", rounding="stochastic")
    else:
        weights = scaled("float32")
    chosen = slot_formats(rule, options["state_format"], weights)
    full_precision = {
        slot: is_full_precision(
            part.shape,
            name,
            options["full_precision"],
            spec.get("min_numel") if own is None else own,
        )
        for slot, spec in chosen.items()
    }
    for slot in ops.rule(rule)["slots"]:
        name = slot["name"]
        if slot["slow"] and not is_named(options["state_format"], name):
            chosen[name] = slow_mean(chosen[name], full_precision[name])
    return chosen, full_precision


def rule_of(
    rule: str,
    chosen: Mapping[str, Mapping[str, Any]],
    full_precision: Mapping[str, bool],
    ndim: int,
) -> str:
    """The rule with those second moments factored that `chosen` wants so;
    full-precision state and vectors are not.
    """
    wanted = [name for name, spec in chosen.items() if spec["format"] == FACTORED]
    if not wanted or ndim < 2:
        return rule
    factored = f"{rule}_factored"
    if factored not in ops.names("rules") or wanted != ops.rule(factored)["factors"]:
        raise ValueError(f"{rule} cannot keep {' and '.join(wanted)} factored")
    return rule if all(full_precision[name] for name in wanted) else factored


def slots_of(
    rule: str, chosen: Mapping[str, Mapping[str, Any]], full_precision: Mapping[str, bool]
) -> tuple[Slot, ...]:
    """The slots of a rule in the formats that `chosen` has for it,
    or for the rule that it is the factored variant of.
    """
    slots = []
    for slot in ops.rule(rule)["slots"]:
        name, spec = slot["name"], chosen[slot["name"]]
        if spec["format"] == FACTORED or (full_precision[name] and spec["scale"] != "none"):
            spec = scaled("float32")
        stochastic = spec["rounding"] == "stochastic"
        slots.append(Slot(name, spec["format"], spec["block"], spec["scale"], stochastic))
    return tuple(slots)


def is_frozen(p: Tensor) -> bool:
    """Whether no step changes a parameter as it is now: it needs no gradient and has none."""
    return not getattr(p, "requires_grad", True) and p.grad is None


def _no_param_format(name: object, dtype: torch.dtype) -> ValueError:
    """The error about what no parameter format is called, for a parameter of this dtype."""
    known = [*_BY_DTYPE, *(entry["name"] for entry in ops.entries("param"))]
    word = str(name).lower()
    ending = [each for each in known if each.endswith(f"_{word}")]  # bfloat16_kahan, of Kahan
    if dtype != torch.float32:  # which has none of these: bfloat16's are meant
        own = str(dtype).removeprefix("torch.")
        ending = [each for each in ending if each.startswith(f"{own}_")]
    meant = did_you_mean(word, ending[:1] or known, cutoff=0.0 if ending else 0.7)
    there = f"{meant} There" if meant else "; there"
    return ValueError(f"no parameter format is named {name!r}{there} are {', '.join(known)}")


def param_format_of(p: Tensor, param_format: str, what: str) -> str:
    """The parameter format's name.

    "auto" rounds 16-bit parameters stochastically and "nearest" rounds them to nearest;
    both are plain for float32. A frozen parameter that no parameter format, or not this one,
    stores, such as quantized weights below an adapter, has "float32" until it is trained.

    Raises:
        ValueError: there is no such parameter format; or none, or not this one, stores the dtype of
            a parameter that is trained.
    """
    dtype = str(p.dtype).removeprefix("torch.")
    supported = sorted({entry["dtype"] for entry in ops.entries("param")})
    possible = f"{', '.join(supported[:-1])} or {supported[-1]}"
    by_dtype = param_format in _BY_DTYPE
    if not by_dtype and param_format not in ops.names("param"):
        raise _no_param_format(param_format, p.dtype)
    stored = None if by_dtype else ops.param_format(param_format)["dtype"]
    fits = dtype in supported if by_dtype else dtype == stored
    if not fits and is_frozen(p):
        return "float32"
    if dtype not in supported:
        raise ValueError(f"{what} is {dtype}, which lowbit does not support: use {possible}")
    if not fits:
        raise ValueError(
            f"{what} is {dtype}, but param_format={param_format!r} is for {stored}: "
            f"convert the model to {stored}, or leave param_format out. If the model was {stored}, "
            "a framework has converted it, as Accelerate's mixed_precision does under FSDP, or "
            "steps float32 copies, as DeepSpeed does in stage 0 under bf16 and fp16"
        )
    if by_dtype:
        return f"{dtype}_stochastic" if param_format == "auto" and dtype != "float32" else dtype
    return param_format
