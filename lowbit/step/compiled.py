"""Steps that torch.compile traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.torch_version import TorchVersion

from lowbit import sharding
from lowbit.state.layout import Layout

# Dynamo of torch 2.11 fails where an optimizer's attribute is set after a graph break.
_SETS_ATTRIBUTES = TorchVersion(torch.__version__) >= "2.13"


def is_left_out(groups: Iterable[Mapping[str, Any]], layouts: Mapping[Any, Layout]) -> bool:
    """Whether Dynamo is to leave a step over these groups uncompiled, since it cannot follow it.

    Sharded parameters: it cannot follow a DTensor's local tensor through a whole step. Rules and
    scales that measure before they update: the size of their workspace follows from the values of
    a plan, which a traced step does not have.

    Args:
        layouts: by parameter.
    """
    return (
        not _SETS_ATTRIBUTES
        or any(lay.phases > 0 for lay in layouts.values())
        or any(sharding.is_sharded(p) for group in groups for p in group["params"])
    )
