"""Names of other libraries that lowbit lacks: the error says what to write instead."""

from __future__ import annotations

import re
import sys
from typing import NoReturn

import torch

from lowbit.config.hints import did_you_mean, no_attribute

_PAGED = "state_memory='managed'"
_PINNED = " ('pinned' keeps the state in host memory for good)"
_RULES = ("Adam", "AdamW", "AdEMAMix", "Adagrad", "LAMB", "LARS", "Lion", "RMSprop", "SGD")
_OTHERS = {
    "PytorchLARS": "lowbit.LARS(...)",
    "GlobalOptimManager": (
        "overrides=lowbit.override('*.NAME', full_precision=True), or "
        "opt.override_quantize_enable(module, 'weight', False)"
    ),
    "CPUOffloadOptimizer": "lowbit.AdamW(..., state_memory='pinned')",
}


def instead(name: str) -> str | None:
    """What to write for a name of bitsandbytes or torchao, or None."""
    found = re.fullmatch(rf"(Paged)?({'|'.join(_RULES)})(8bit|32bit)?", name)
    if found is None:
        return _OTHERS.get(name)
    paged, rule, bits = found.groups()
    written = rule + "8bit" * (bits == "8bit")
    options = ["state_format='float32'"] * (bits != "8bit") + [_PAGED] * bool(paged)
    return f"lowbit.{written}(..., {', '.join(options)})" + _PINNED * bool(paged)


def missing(name: str) -> NoReturn:
    """`lowbit.__getattr__`: raises for a name that lowbit does not have.

    Raises:
        AttributeError: says what to write. Where the name is imported, an ImportError says it,
            which Python would otherwise word itself.
    """
    if replacement := instead(name):
        no_attribute(f"lowbit has no {name}: write {replacement}")
    near = _near(name)
    message = f"module 'lowbit' has no attribute {name!r}{near}"
    if near:
        no_attribute(message)
    raise AttributeError(message)  # the name may be that of a room that is imported next


def _near(name: str) -> str:
    """A hint of a public name that is nearly this one, or ""."""
    if name.startswith("_"):  # such as what copy and inspect look for
        return ""
    public = [key for key in sys.modules["lowbit"].__all__ if not key.startswith("_")]
    optimizer = getattr(torch.optim, name, None)
    if isinstance(optimizer, type) and optimizer is not torch.optim.Optimizer:
        # RAdam is another algorithm than Adam.
        *here, last = sorted(key for key in public if hasattr(torch.optim, key))
        return f"; of torch's optimizers it has {', '.join(here)} and {last}"
    plain = name.lower().replace("_", "")
    same = [key for key in public if key.lower().replace("_", "") == plain]
    return did_you_mean(name, same or public, cutoff=0.0 if same else 0.8)
