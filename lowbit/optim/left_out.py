"""Parameters that `lowbit.param_groups` left out because they were frozen, and that are trained
later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowbit.config.hints import warn_once

# By model, the names of the parameters that were left out. No weak references to the parameters,
# since torch swaps no tensor that has some.
_LEFT_OUT: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
_OPTIMIZERS: weakref.WeakSet[Any] = weakref.WeakSet()  # of lowbit, whose groups may have them


def remember(model: nn.Module) -> None:
    """Records which parameters of a model are frozen, in place of an earlier record."""
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    if frozen:
        _LEFT_OUT[model] = frozen
    else:
        _LEFT_OUT.pop(model, None)


@contextlib.contextmanager
def unrecorded(model: nn.Module) -> Iterator[None]:
    """For groups of which no optimizer is made: the record of the model stays as it is."""
    before = _LEFT_OUT.get(model)
    try:
        yield
    finally:
        _LEFT_OUT.pop(model, None)
        if before is not None:
            _LEFT_OUT[model] = before


class Watch:
    """Looks now and then whether parameters that were left out have gradients.

    Going through the parameters of a large model takes about a millisecond, so only every 32nd step
    looks.
    """

    EVERY = 32

    def __init__(self, opt: Any) -> None:
        self._steps = 0
        _OPTIMIZERS.add(opt)

    @torch._disable_dynamo  # which would compile it anew for each count
    def look(self, opt: Any) -> None:
        """Called after each step. Warns, once for an optimizer, of parameters that have a gradient
        and that no optimizer of lowbit has, if this one has others of their model.
        """
        self._steps += 1
        if self._steps % self.EVERY or not _LEFT_OUT or "left out" in opt.warned:
            return
        here = _params_of(opt)
        stepped = here.union(*map(_params_of, list(_OPTIMIZERS)))
        for model, frozen in list(_LEFT_OUT.items()):
            named = list(model.named_parameters())
            missed = [
                name
                for name, p in named
                if name in frozen
                and p.requires_grad
                and p.grad is not None
                and id(p) not in stepped
            ]
            if missed and any(id(p) in here for _, p in named):
                warn_once(opt.warned, "left out", _message(missed))


def _params_of(opt: Any) -> set[int]:
    return {id(p) for group in opt.param_groups for p in group["params"]}


def _message(missed: list[str]) -> str:
    others = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
    return (
        f"this optimizer does not train {missed[0]!r}{others}: frozen when the parameter groups "
        "were made, and so left out of them, but with a gradient now. Add what is unfrozen by "
        "opt.add_param_group({'params': [(name, p), ...]}), or build the optimizer from "
        "model.named_parameters(), in which frozen parameters take no memory. Ignore this if "
        "another optimizer steps them"
    )
