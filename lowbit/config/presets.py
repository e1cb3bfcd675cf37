"""The vocabulary of `state_format`: presets, formats and `scaled(...)`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from lowbit import ops
from lowbit.config.hints import did_you_mean

ROUNDINGS = ("nearest", "stochastic")
FACTORED = "factored"


@functools.cache
def known() -> dict[str, dict[str, Any]]:
    """The presets by name, from csrc/policy/presets.cpp: for a state with negative values,
    `signed`, and for one without, `unsigned`, arguments of `scaled`, or {"format": "factored"}."""
    return {entry["name"]: entry for entry in ops.policy("presets")}


def scaled(
    format: str,
    *,
    scale: str = "block",
    block: int | None = None,
    rounding: str = "nearest",
    min_numel: int | None = None,
) -> dict[str, Any]:
    """The format of one state tensor, for `state_format={name: lowbit.scaled(...)}`.

    Args:
        format: a name in `lowbit.catalog()["state"]`.
        scale: what one scale covers: a "block" of a row (default), a "row", a "column", the
            "tensor", or "rank1". "rank1" keeps a maximum for each index of every dimension; a
            value's scale is the least of its maxima (arXiv:2309.01507).
        block: the block's length in values, a power of two from 32 to 2048;
            the format's own by default.
        rounding: "nearest" (default), or "stochastic",
            which rounds up or down at random and preserves the mean.
        min_numel: parameters of fewer elements keep this state in full precision. A group's or
            override's `min_numel` has priority. None (default) sets no threshold here.

    Returns:
        The arguments, checked and completed.

    Raises:
        ValueError: an unknown format, scale or rounding, or a contradictory combination.
    """
    info, block = ops.state_format(format), block or None  # a spec without blocks has 0
    scales, blocks = ops.plan_names("scales"), ops.policy("blocks")
    if scale not in scales or rounding not in ROUNDINGS:
        raise ValueError(
            f"scale must be one of {', '.join(scales[1:])} and rounding one of "
            f"{', '.join(ROUNDINGS)}, not {scale!r} and {rounding!r}"
        )
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
        raise ValueError(f"{format} needs a scale: one of {', '.join(scales[1:])}")
    if scale != "block":
        if block is not None:
            raise ValueError(f"scale={scale!r} has no blocks; leave block out")
        if not info["cross_tile"]:
            raise ValueError(
                f"the scale of {format} is more than the largest value, so shards cannot agree on "
                "it; it can only have scale='block'"
            )
        return made
    block = info["block"] if block is None else block
    if block not in blocks:
        raise ValueError(
            f"block must be a power of two from {blocks[0]} to {blocks[-1]}, not {block}"
        )
    return {**made, "block": int(block)}


def checked_numel(min_numel: Any) -> int:
    """The threshold, a number of elements. Raises ValueError unless it is an int of at least 0."""
    if not isinstance(min_numel, Integral) or isinstance(min_numel, bool) or min_numel < 0:
        raise ValueError(f"min_numel must be a number of elements, not {min_numel!r}")
    return int(min_numel)


def choice(name: Any, *, signed: bool) -> dict[str, Any]:
    """The `scaled(...)` arguments of a preset, a format, "factored" or a spec.

    Args:
        name: the preset, format, "factored" or spec.
        signed: whether the state has negative values.

    Raises:
        ValueError: there is no such preset or format, or its options contradict each other.
    """
    chosen = name
    if isinstance(name, str) and name in known():
        chosen = known()[name]["signed" if signed else "unsigned"]
    spec = {"format": chosen} if isinstance(chosen, str) else chosen
    if not isinstance(spec, Mapping) or "format" not in spec:
        raise ValueError(
            f"{name!r} is not a state format"
            f"{_advice(name, 'pass a preset, a format or lowbit.scaled(...)')}"
        )
    if spec["format"] == FACTORED:
        if len(spec) > 1:
            raise ValueError("a factored state is float32 rows and columns; leave the rest out")
        return dict(spec)
    if unknown := set(spec) - {"format", "scale", "block", "rounding", "min_numel"}:
        raise ValueError(
            f"{sorted(unknown)} are not options of a state; see the arguments of lowbit.scaled"
        )
    if spec["format"] not in ops.names("state"):
        reason = (
            f"no preset and no state format is named {spec['format']!r}"
            if chosen is name
            else (
                f"the preset {name!r} needs the state format {spec['format']!r}, which this build "
                "does not have"
            )
        )
        raise ValueError(
            reason
            + _advice(
                spec["format"],
                f"presets are {', '.join(available())}; "
                "lowbit.catalog()['state'] lists the formats",
            )
        )
    return scaled(**spec)


def _advice(given: Any, text: str) -> str:
    """What follows the words that something is not a state format: the name that was meant, if any,
    and `text`.
    """
    meant = _meant(given)
    return f"{meant} {text[0].upper()}{text[1:]}" if meant else f"; {text}"


# What people write for formats that have another name here.
_OTHER_WORDS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "float8": "fp8",
    "nf4": "4bit",
    "fp4": "4bit",
}


def _meant(given: Any) -> str:
    """The text "; did you mean 'x'?" for something that is not a state format, such as 8,
    "int8" or torch.uint8; or "".
    """
    word = str(given).removeprefix("torch.").lower()
    bits = re.fullmatch(r"(?:u?int|q)?[-_ ]?(\d+)[-_ ]?(?:bits?)?", word)
    if bits:
        word = {"16": "bfloat16", "32": "float32"}.get(bits[1], f"{bits[1]}bit")
    word = _OTHER_WORDS.get(word, word)
    names = available()
    if word in names:
        return f"; did you mean {word!r}?"
    return did_you_mean(word, [*names, *ops.names("state")])


def slot_formats(
    rule: str, state_format: str | Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """What `state_format` says of each state tensor of a rule: a `scaled(...)`,
    or {"format": "factored"}.

    Args:
        rule: a name in `lowbit.catalog()["rules"]`.
        state_format: a preset, a format or a `scaled(...)`; or one of these for each state's name.
            A name that is left out means float32.
        weights: the `scaled(...)` of a state that is a copy of weights and not named;
            None (default) is float32.

    Raises:
        ValueError: an unknown format or state, or a format that cannot hold the state's values.
    """
    slots = {slot["name"]: slot["signed"] for slot in ops.rule(rule)["slots"]}
    copies = [slot["name"] for slot in ops.rule(rule)["slots"] if slot["weight"]]
    by_name = _by_name(state_format)
    if by_name and (unknown := set(state_format) - set(slots)):
        raise ValueError(f"state_format names {sorted(unknown)}, but {rule} keeps {list(slots)}")
    if not slots and not by_name:
        choice(state_format, signed=True)  # refuses unknown words
    made = {}
    given: Any = state_format
    for name, signed in slots.items():
        chosen = given.get(name, "float32") if by_name else given
        if name in copies and not (by_name and name in state_format):
            chosen = weights or "float32"
        spec = choice(chosen, signed=signed)
        if signed and spec["format"] == FACTORED:
            raise ValueError(f"{name} has negative values, so it cannot be stored factored")
        if signed and not ops.state_format(spec["format"])["signed"]:
            raise ValueError(
                f"{name} has negative values, which the unsigned format "
                f"{spec['format']} cannot hold"
            )
        chance = not signed and spec.get("rounding") == "stochastic"
        if (
            chance
            and ops.state_format(spec["format"])["signed"]
            and not ops.has_zero(spec["format"])
        ):
            raise ValueError(
                f"{name} is never negative, but {spec['format']} has no zero, so stochastic "
                f"rounding would make small values negative; use {spec['format']}_unsigned, or "
                "rounding='nearest'"
            )
        made[name] = spec
    return made


def is_named(state_format: str | Mapping[str, Any], slot: str) -> bool:
    """Whether `state_format` says something of the state of that name alone."""
    return _by_name(state_format) and slot in state_format


def slow_mean(spec: Mapping[str, Any], full_precision: bool) -> dict[str, Any]:
    """What the format of all states becomes for a mean over thousands of steps
    (csrc/policy/presets.h).

    Args:
        spec: the `scaled(...)` of all states, or {"format": "factored"}.
        full_precision: whether codes become float32.
    """
    if spec["format"] == "float32" or (full_precision and spec.get("scale") != "none"):
        return scaled("float32")
    return choice(ops.policy("slow_mean"), signed=True)


def formats_named(state_format: str | Mapping[str, Any]) -> Iterator[str]:
    """Every format that `state_format` may select, under any rule."""
    given: Any = state_format
    for chosen in given.values() if _by_name(given) else [given]:
        for signed in (True, False):
            yield choice(chosen, signed=signed)["format"]


def _by_name(state_format: str | Mapping[str, Any]) -> bool:
    return isinstance(state_format, Mapping) and "format" not in state_format


def available() -> list[str]:
    """The names of the presets whose formats this build has."""
    formats = ops.names("state") | {FACTORED}
    return [
        name
        for name, preset in known().items()
        if {preset["signed"]["format"], preset["unsigned"]["format"]} <= formats
    ]


def catalog() -> dict[str, Any]:
    """All presets, formats, rules and instruction sets of this build.

    Returns:
        A dictionary of lists.
        `presets`: names for `state_format`: `name`, and its meaning for a state with negative
            values (`signed`) and without (`unsigned`): a `scaled(...)` or {"format": "factored"}.
        `state`: formats of optimizer state: `name`, `index`, `bits`, default `block`, `scaled`,
            `signed`, `dtype` of the codes, `domain` in which the nearest code is chosen,
            `scale_dtype`, `scale_numbers` per block, and `cross_tile`: whether one scale may cover
            more than a block.
        `rules`: update rules: `name`, `index`, `slots`, `hyper`, `factors` (second moments kept as
            row and column means), `rounds` of sums before the update, `grids` (the factored moment
            that each round sums for, or -1), and `numbers` that are kept for each tensor.
        `param`: parameter formats: `name`, `index`, `dtype`, `compensation` (its dtype; empty for
            none), `compensation_bytes`, and `random`: whether it rounds at random.
        `thresholds`: parameters of fewer dimensions (`min_dims`), elements (`min_numel`) or
            elements per row (`min_cols`) keep full-precision state.
        `slow_mean`: the preset of a mean over thousands of steps (`slow` in a rule's `slots`),
            unless `state_format` names the state or is "float32".
        `blocks`: the lengths that a block may have.
        `wrapper_prefixes`: the prefixes that `clean_name` removes from a parameter's name.
        `mean_addends`: the most addends of an exact mean.
        `isas`: instruction sets that this processor runs, best last.
        `isa`: the instruction set in use.
        `cuda`: the GPU architectures that kernels were built for, as CMake names them: "80" is
            machine code and PTX, "90-real" machine code.
    """
    presets = [
        {
            "name": name,
            **{kind: choice(name, signed=kind == "signed") for kind in ("signed", "unsigned")},
        }
        for name in available()
    ]
    return {**ops.catalog(), "presets": presets}
