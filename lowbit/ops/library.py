"""The library of operators and its catalog: what is registered, by name and by number."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def _load() -> None:
    spec = importlib.util.find_spec("lowbit._ops")
    if spec is None or spec.origin is None:
        raise ImportError(
            "lowbit's operators are not built: there is no _ops.so in the package. "
            "Build it with `pip install --no-build-isolation .` after installing torch."
        )
    torch.ops.load_library(spec.origin)


_load()


operators = torch.ops.lowbit


_CALLED = {"state": "state format", "rules": "update rule", "param": "parameter format"}


_numbers: dict[tuple[str, str], int] = {}  # (kind, name) -> the catalog's index


@functools.cache
def registered() -> dict[str, Any]:
    made = json.loads(operators.catalog())
    for kind in _CALLED:
        _numbers.update({(kind, entry["name"]): entry["index"] for entry in made[kind]})
    return made


def number(kind: str, name: str) -> int:
    """The catalog's index of a name. Operators take it because torch's stable ABI, up to 2.13,
    never frees a string.

    Raises:
        RuntimeError: the catalog has no such name.
    """
    if (kind, name) not in _numbers:
        registered()
    if (kind, name) not in _numbers:
        raise RuntimeError(
            f"lowbit: no {_CALLED[kind]} is named {name!r}; lowbit.catalog() lists them"
        )
    return _numbers[kind, name]


def catalog() -> dict[str, Any]:
    """The formats and rules that the operators were built with,
    as `lowbit.catalog` describes them.
    """
    return json.loads(operators.catalog())


def cuda_error() -> str:
    """Why CUDA kernels cannot be used here, such as a torch without CUDA; "" if they can.
    Opens their library, and asks no GPU.
    """
    return operators.cuda_error()


def entries(kind: str) -> Sequence[Mapping[str, Any]]:
    """The catalog's entries of a kind: "state", "rules" or "param".
    The result is shared: do not change it.
    """
    return registered()[kind]


def policy(what: str) -> Any:
    """What csrc/policy decides about parameters: "presets", "thresholds", "slow_mean", "blocks",
    "wrapper_prefixes" or "mean_addends". Shared: only to be read.
    """
    return registered()[what]


@functools.cache
def names(kind: str) -> frozenset[str]:
    """The names of the catalog's entries of a kind: "state", "rules" or "param"."""
    return frozenset(entry["name"] for entry in registered()[kind])


@functools.cache
def _entry(kind: str, called: str, name: str) -> dict[str, Any]:
    for entry in registered()[kind]:
        if entry["name"] == name:
            return entry
    known = ", ".join(entry["name"] for entry in registered()[kind])
    raise ValueError(f"no {called} is named {name!r}; there are {known}")


def state_format(name: str) -> dict[str, Any]:
    """The catalog's entry of a state format. Raises ValueError, which lists all names,
    if there is none.
    """
    return _entry("state", "state format", name)


def param_format(name: str) -> dict[str, Any]:
    """The catalog's entry of a parameter format. Raises ValueError, which lists all names,
    if there is none.
    """
    return _entry("param", "parameter format", name)


def rule(name: str) -> dict[str, Any]:
    """The catalog's entry of an update rule. Raises ValueError, which lists all names,
    if there is none.
    """
    return _entry("rules", "rule", name)


@functools.cache
def plan_columns() -> Mapping[str, int]:
    """The columns of a plan row (csrc/policy/plan.h): number by name."""
    return {name: number for number, name in enumerate(registered()["plan"]["columns"])}


def plan_limit(kind: str) -> int:
    """How many of a kind a plan row has room for: "slots" or "dims"."""
    return int(registered()["plan"][kind])


@functools.cache
def plan_names(kind: str) -> tuple[str, ...]:
    """The names of "scales" or "cuts", by the number that a plan row holds."""
    return tuple(registered()["plan"][kind])


def plan_row(values: Mapping[str, int]) -> list[int]:
    """A plan row from values by column name; columns without a value are 0.

    Raises:
        KeyError: there is no such column.
    """
    columns = plan_columns()
    row = [0] * len(columns)
    for name, value in values.items():
        row[columns[name]] = value
    return row


def set_isa(name: str) -> None:
    """Selects one of `catalog()["isas"]`, as the environment variable LOWBIT_ISA does at start.

    Results have the same bits; only the speed differs.

    Raises:
        RuntimeError: this processor has no such instruction set.
    """
    operators.set_isa(name)
