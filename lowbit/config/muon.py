"""Muon's own options: coefficients of Newton-Schulz steps by name,
and parameters that hold several matrices.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from lowbit.config import arguments
from lowbit.config.arguments import AllOptions
from lowbit.config.overrides import clean_name

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = (
    Triple | Sequence[Triple] | Literal["quintic", "polar_express", "deepseek"]
)
Split: TypeAlias = int | Sequence[int] | Mapping[str, int | Sequence[int]] | None
Orthogonalize: TypeAlias = Literal["auto", "exact", "torch"]

WAYS = ("auto", "exact", "torch")


class MuonOptions(AllOptions, total=False):
    """What Muon and MuonWithAdamW take besides the arguments of torch.optim.Muon."""

    orthogonalize: Orthogonalize
    split: Split
    normuon_beta2: float | None
    cautious_weight_decay: bool


# In the order that signatures show them.
OWN: Mapping[str, Any] = {
    "orthogonalize": "auto",
    "split": None,
    "normuon_beta2": None,
    "cautious_weight_decay": False,
}
DEFAULTS: Mapping[str, Any] = {**OWN, **arguments.DEFAULTS}

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)  # K. Jordan's, and torch's default
# arXiv:2505.16932, algorithm 1; all but the last are divided by powers of the factor.
_POLAR_FACTOR = 1.01
_POLAR: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_LAST: Triple = (2.0, -1.5, 0.5)  # of DeepSeek's last two steps
NAMES = ("quintic", "polar_express", "deepseek")


class Schedule(NamedTuple):
    """The steps of an orthogonalization."""

    coefficients: list[float]  # a, b, c of each step
    factor: float  # of the norm by which the update is divided


def schedule(coefficients: Any, steps: int) -> Schedule:
    """The steps that `ns_coefficients` and `ns_steps` ask for.

    Raises:
        ValueError: they are not a name, three numbers or a sequence of three numbers each, or
            there are no steps, or 100 or more.
    """
    if not 0 < steps < 100:
        raise ValueError(f"ns_steps should be at least 1 and less than 100 but is: {steps}")
    if isinstance(coefficients, str):
        return Schedule(*_named(coefficients, steps))
    several = list(coefficients)
    if not any(isinstance(one, Sequence) for one in several):
        several = [several] * steps
    if not several or any(len(one) != 3 for one in several) or len(several) >= 100:
        raise ValueError(
            "ns_coefficients should be three numbers, a sequence of three numbers for each step, "
            f"or one of {', '.join(NAMES)}, but is: {coefficients!r}"
        )
    return Schedule([float(number) for one in several for number in one], 1.0)


def _named(name: str, steps: int) -> tuple[list[float], float]:
    if name == "quintic":
        return list(QUINTIC) * steps, 1.0
    if name == "deepseek":
        return list(QUINTIC) * 8 + list(_LAST) * 2, 1.0
    if name == "polar_express":
        f = _POLAR_FACTOR
        scaled = [(a / f, b / f**3, c / f**5) for a, b, c in _POLAR[:-1]]
        every = scaled + [_POLAR[-1]] * steps
        return [number for one in every[:steps] for number in one], f
    raise ValueError(f"ns_coefficients should be one of {', '.join(NAMES)} but is: {name!r}")


def ratio(adjust: str | None, rows: int, cols: int) -> float:
    """The factor of the learning rate for a matrix of this shape, as torch.optim.Muon has it."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / max(cols, 1)))  # without columns, nothing is stepped


def pieces(
    split: Split, shape: Sequence[int], name: str | None, index: int, what: str
) -> tuple[int, ...]:
    """The numbers of rows of the matrices that a parameter is split into; of each matrix of a
    batch.

    Args:
        split: the option. A mapping holds for the parameters whose name matches a pattern,
            the first one counts.
        shape: of the whole parameter, two or three dimensions.
        name: of the parameter, or None.
        index: its number, which patterns are compared with if it has no name.
        what: the parameter, for errors.

    Raises:
        ValueError: the rows cannot be split so.
    """
    if isinstance(split, Mapping):
        known = str(index) if name is None else clean_name(name)
        split = next((split[p] for p in split if fnmatch.fnmatch(known, p)), None)
    rows = shape[-2]
    if split is None:
        return (rows,)
    if isinstance(split, int):
        if split < 1 or rows % split:
            raise ValueError(f"{what} has {rows} rows, which split={split} does not divide evenly")
        return (rows // split,) * split
    made = tuple(split)
    if any(not isinstance(n, int) or n < 1 for n in made) or sum(made) != rows:
        raise ValueError(
            f"{what} has {rows} rows, and split={split!r} has {sum(made)}; split is a number of "
            "equal parts, or the rows of each part"
        )
    if len(shape) == 3 and len(set(made)) > 1:
        raise ValueError(
            f"{what} is a batch of {shape[0]} matrices, which split={split!r} would cut into "
            "unequal parts; give a number of equal parts"
        )
    return made


def check(group: Mapping[str, Any]) -> None:
    """Checks Muon's own arguments, with torch's messages where torch checks them.

    Raises:
        TypeError: one is not a number, or not a flag.
        ValueError: one is out of range.
    """
    arguments.check_flags(group, "nesterov", "cautious_weight_decay")
    arguments.real("eps", group["eps"])
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for key, name in (
        ("lr", "Learning rate"),
        ("momentum", "momentum"),
        ("weight_decay", "weight decay"),
    ):
        value = group[key]
        if not arguments.real(key, value) >= 0.0:
            raise ValueError(f"{name} should be >= 0 but is: {value}")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")
    if group["orthogonalize"] not in WAYS:
        raise ValueError(
            f"orthogonalize should be one of {', '.join(WAYS)} but is: {group['orthogonalize']!r}"
        )
    beta2 = group["normuon_beta2"]
    if beta2 is not None and not 0.0 <= beta2 < 1.0:
        raise ValueError(f"normuon_beta2 should be None or in [0, 1) but is: {beta2}")
    schedule(group["ns_coefficients"], group["ns_steps"])
