"""What a user may say of how state is kept: presets, formats and `scaled(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lowbit import ops

SCALES = ("none", "block", "row", "column", "tensor", "rank1")
ROUNDINGS = ("nearest", "stochastic")
LEAST_BLOCK, MOST_BLOCK = 32, 2048
FACTORED = "factored"

# Public names of `state_format`: what it means for a state with negative values, and for one without. A format, or arguments of `scaled`.
PRESETS: dict[str, tuple[Any, Any]] = {
    "8bit": ("dynamic8", "dynamic8_unsigned"),
    # Below 8 bits the second moment's map has no zero: a step divides by its root.
    **{f"{bits}bit": (f"dynamic{bits}", f"power1_{bits}_unsigned") for bits in range(7, 1, -1)},
    "fp8": ("float8_e4m3", "float8_e4m3_unsigned"),
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2_unsigned"),
    "log8": ("log8_signed", "log8"),
    "linear8": ("linear8", "linear8_unsigned"),
    "companded8": ("companded8", "companded8_unsigned"),
    "lpmm4": (
        {"format": "dynamic4", "block": 128},
        {"format": "power1_4_unsigned", "scale": "rank1"},
    ),
    "factored8": ("dynamic8", FACTORED),
    "factored4": ("dynamic4", FACTORED),
    "bfloat16": ("bfloat16", "bfloat16"),
    "bfloat16_stochastic": ({"format": "bfloat16", "rounding": "stochastic"},) * 2,
    "float32": ("float32", "float32"),
}


def scaled(
    format: str,
    *,
    scale: str = "block",
    block: int | None = None,
    rounding: str = "nearest",
    min_numel: int | None = None,
) -> dict[str, Any]:
    """How one state tensor is kept, for `state_format={name: lowbit.scaled(...)}`.

    Args:
        format: of `lowbit.catalog()["state"]`.
        scale: what one scale covers: a "block" of a row, a "row", a "column", the "tensor", or "rank1": the least of one maximum for
            each dimension (arXiv:2309.01507).
        block: length of a block, a power of two from 32 to 2048; the format's own by default.
        rounding: "nearest", or "stochastic": up or down by chance, so that the mean is kept.
        min_numel: parameters of fewer elements keep this state wide; a group's or an override's `min_numel` goes before it.

    Raises:
        ValueError: no such format, scale or rounding, or a combination that makes no sense.
    """
    info, block = ops.state_format(format), block or None  # 0 is what a spec without blocks holds
    if scale not in SCALES or rounding not in ROUNDINGS:
        raise ValueError(f"scale must be one of {', '.join(SCALES[1:])} and rounding one of {', '.join(ROUNDINGS)}, not {scale!r} and {rounding!r}")  # fmt: skip
    made = {"format": format, "scale": scale, "block": 0, "rounding": rounding}
    if min_numel is not None:
        made["min_numel"] = checked_numel(min_numel)
    if not info["scaled"]:
        if block is not None or scale not in ("block", "none"):
            raise ValueError(f"{format} has no scales; leave scale and block out")
        if rounding == "stochastic" and format == "float32":
            raise ValueError("float32 state is not rounded; leave rounding out")
        return {**made, "scale": "none"}
    if scale == "none":
        raise ValueError(f"{format} needs a scale: one of {', '.join(SCALES[1:])}")
    if scale != "block":
        if block is not None:
            raise ValueError(f"scale={scale!r} has no blocks; leave block out")
        if not info["measurable"]:
            raise ValueError(f"{format} takes more than the largest value for a scale; it can only have scale='block'")  # fmt: skip
        return made
    block = info["block"] if block is None else block
    if block not in (32, 64, 128, 256, 512, 1024, 2048):
        raise ValueError(f"block must be a power of two from {LEAST_BLOCK} to {MOST_BLOCK}, not {block}")  # fmt: skip
    return {**made, "block": int(block)}


def checked_numel(min_numel: Any) -> int:
    """A threshold of elements; ValueError where it is none."""
    if not isinstance(min_numel, int) or isinstance(min_numel, bool) or min_numel < 0:
        raise ValueError(f"min_numel must be a number of elements, not {min_numel!r}")
    return min_numel


def choice(name: Any, *, signed: bool) -> dict[str, Any]:
    """What a preset, a format's name, "factored" or arguments of `scaled` mean for a state with (`signed`) or without negative values.

    Raises:
        ValueError: there is no such preset or format, or not that combination.
    """
    said = name
    if isinstance(name, str) and name in PRESETS:
        said = PRESETS[name][0 if signed else 1]
    spec = {"format": said} if isinstance(said, str) else said
    if not isinstance(spec, Mapping) or "format" not in spec:
        raise ValueError(
            f"{name!r} says nothing of a state; give a preset, a format or lowbit.scaled(...)"
        )
    if spec["format"] == FACTORED:
        if len(spec) > 1:
            raise ValueError("a factored state is float32 rows and columns; leave the rest out")
        return dict(spec)
    if unknown := set(spec) - {"format", "scale", "block", "rounding", "min_numel"}:
        raise ValueError(
            f"{sorted(unknown)} are no options of a state; see the arguments of lowbit.scaled"
        )
    if spec["format"] not in ops.names("state"):
        reason = (
            f"no preset and no state format is named {spec['format']!r}"
            if said is name
            else f"the preset {name!r} needs the state format {spec['format']!r}, which this build does not have"
        )
        raise ValueError(
            f"{reason}; presets are {', '.join(available())}; lowbit.catalog()['state'] lists the formats"
        )
    return scaled(**spec)


def choices(rule: str, state_format: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `state_format` says of each state tensor of a rule: a `scaled(...)`, or {"format": "factored"}.

    Args:
        state_format: a preset, a format, a `scaled(...)`, or any of them for each state's name; a name left out is float32.

    Raises:
        ValueError: no such format or state, or one that cannot hold the state's values.
    """
    slots = {slot["name"]: slot["signed"] for slot in ops.rule(rule)["slots"]}
    by_name = _by_name(state_format)
    if by_name and (unknown := set(state_format) - set(slots)):
        raise ValueError(f"state_format names {sorted(unknown)}, but {rule} keeps {list(slots)}")
    made = {}
    for name, signed in slots.items():
        said = state_format.get(name, "float32") if by_name else state_format  # type: ignore[union-attr]
        spec = choice(said, signed=signed)
        if signed and spec["format"] == FACTORED:
            raise ValueError(f"{name} has negative values, so it cannot be stored factored")
        if signed and not ops.state_format(spec["format"])["signed"]:
            raise ValueError(
                f"{name} has negative values, which the unsigned format {spec['format']} cannot hold"
            )
        chance = not signed and spec.get("rounding") == "stochastic"
        if chance and ops.state_format(spec["format"])["signed"] and not ops.has_zero(spec["format"]):  # fmt: skip
            raise ValueError(
                f"{name} is never negative, but {spec['format']} has no zero, so rounding by chance would make small values negative; "
                f"take {spec['format']}_unsigned, or rounding='nearest'"
            )
        made[name] = spec
    return made


def formats_named(state_format: str | Mapping[str, Any]) -> Iterator[str]:
    """Every format that `state_format` may mean, whichever rule it is for."""
    for said in state_format.values() if _by_name(state_format) else [state_format]:  # type: ignore[union-attr]
        for signed in (True, False):
            yield choice(said, signed=signed)["format"]


def _by_name(state_format: str | Mapping[str, Any]) -> bool:
    return isinstance(state_format, Mapping) and "format" not in state_format


def available() -> list[str]:
    """The presets whose formats are registered."""
    known = ops.names("state") | {FACTORED}
    return [
        name
        for name, pair in PRESETS.items()
        if all((said if isinstance(said, str) else said["format"]) in known for said in pair)
    ]


def catalog() -> dict[str, Any]:
    """Everything that is registered.

    Returns:
        `presets`: names that `state_format` takes (`name`, and what it means for a state with negative values, `signed`, and without,
            `unsigned`: a `scaled(...)` or {"format": "factored"});
        `state`: formats of optimizer state (`name`, `index`, `bits`, `block`, `scaled`, `signed`, `dtype`, `domain` in which a code is the nearest,
            `scale_dtype`, `scale_numbers` for each block, `measurable`: whether a scale may cover more than a block);
        `rules`: update rules (`name`, `slots`, `hyper`, `factors`: second moments kept as row and column means, `rounds` of sums that are
            measured first, `grids`: the factored moment that each round sums for, -1 for none, `numbers` that are kept for each tensor);
        `param`: parameter formats (`name`, `index`, `dtype`, `extra`: the dtype of what is kept beside the parameter, `random`);
        `isas`: instruction sets that this processor runs, best last; `isa`: the one in use.
    """
    presets = [
        {"name": name, **{kind: choice(name, signed=kind == "signed") for kind in ("signed", "unsigned")}}
        for name in available()
    ]  # fmt: skip
    return {"presets": presets, **ops.catalog()}
