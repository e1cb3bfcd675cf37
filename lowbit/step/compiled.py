"""Steps that torch.compile traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.torch_version import TorchVersion

from lowbit import sharding

# Dynamo of torch 2.11 fails where an optimizer's attribute is set after a graph break.
_SETS_ATTRIBUTES = TorchVersion(torch.__version__) >= "2.13"


def is_left_out(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether Dynamo is to leave a step over these groups uncompiled, since it cannot follow it.

    Sharded parameters: it cannot follow a DTensor's local tensor through a whole step.
    """
    return not _SETS_ATTRIBUTES or any(
        sharding.is_sharded(p) for group in groups for p in group["params"]
    )
