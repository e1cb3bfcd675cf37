"""The workspace of a step of several phases,
by the names that csrc/policy/workspace.h gives its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.ops.library import number, operators, registered


def sum_words() -> int:
    """The words of an exact sum (csrc/core/exact_sum.h)."""
    return int(registered()["workspace"]["sum_words"])


def power_words() -> int:
    """The words of `exact_powers`: an exact sum, and a count of NaN."""
    return sum_words() + 1


def workspace_tensors() -> Sequence[Mapping[str, str]]:
    """The tensors of a workspace (csrc/policy/workspace.h): "name", "dtype", and "reduction" over
    the shards: "sum", "max", or "" for what stays here.
    """
    return registered()["workspace"]["tensors"]


def workspace(rule: str, plan: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The workspace of a step of several phases, zeroed, by name. It keeps nothing between steps.

    Returns:
        Exact sums of tensors, rows and columns (added over shards); maxima of rows, columns and
        split blocks as bits (maximum over shards); and floats that stay on this rank.
    """
    sizes = workspace_sizes(rule, plan)
    return {
        name: torch.zeros(size, dtype=getattr(torch, info["dtype"]), device=device)
        for info, (name, size) in zip(workspace_tensors(), sizes.items(), strict=True)
    }


def workspace_sizes(rule: str, plan: Tensor) -> dict[str, int]:
    """The lengths of the tensors of `workspace`, by name."""
    sizes = operators.workspace_sizes(number("rules", rule), plan)
    return {info["name"]: n for info, n in zip(workspace_tensors(), sizes, strict=True)}


class Region(NamedTuple):
    """Consecutive numbers of one parameter in one tensor of a workspace,
    which several ranks measure.
    """

    tensor: str
    begin: int  # behind the parameter's first number in the tensor
    width: int  # numbers of each of its rows, or in all
    rows: str  # of the first dimension: "none", "each", or "cut": those that other ranks hold too


def workspace_regions(rule: str, plan: Tensor, phase: int) -> list[Region]:
    """What a phase before the update measures of a parameter, whose plan row is `plan`."""
    numbers = operators.workspace_regions(number("rules", rule), plan, phase)
    published = registered()["workspace"]
    return [
        Region(published["tensors"][tensor]["name"], begin, width, published["rows"][rows])
        for tensor, begin, width, rows in zip(*[iter(numbers)] * 4, strict=True)
    ]
