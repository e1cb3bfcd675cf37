"""The groups of an optimizer to which something shows one group or one tensor at a time,
as DeepSpeed's ZeRO does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import Optimizer


class WholeGroups:
    """All groups with all their tensors, while `opt.param_groups` shows some of them."""

    def __init__(self, opt: Optimizer) -> None:
        self.groups = [(group, group["params"]) for group in opt.param_groups]

    @staticmethod
    def shown(opt: Optimizer) -> list[Any]:
        """The tensors that `opt.param_groups` shows now."""
        return [p for group in opt.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def whole(self, opt: Any) -> Iterator[None]:
        """`opt.param_groups` has everything for a while. A load inside may replace the groups."""
        place = {id(group): i for i, (group, _) in enumerate(self.groups)}
        shown = opt.param_groups
        places = [place.get(id(group)) for group in shown]
        if None in places:
            raise RuntimeError(
                f"{places.count(None)} of the {len(places)} parameter groups are none of those "
                "that were bound: bind again after replacing groups"
            )
        params = [group["params"] for group in shown]
        whole = opt.param_groups = [group for group, _ in self.groups]
        for group, every in self.groups:
            group["params"] = every
        try:
            yield
        finally:
            now = opt.param_groups
            opt.param_groups = shown if now is whole else [now[i] for i in places if i is not None]
            for group, part in zip(opt.param_groups, params, strict=True):
                group["params"] = part
