"""What an optimizer takes of a model, and what it needs before it steps."""

from __future__ import annotations

from typing import Any

from torch import nn

import lowbit


def params_for(cls: type, model: nn.Module) -> list[Any]:
    """All named parameters; Muon takes matrices only,
    and MuonWithAdamW groups that say which rule steps them.
    """
    if cls is lowbit.MuonWithAdamW:
        return lowbit.muon_param_groups(model)
    return [(n, p) for n, p in model.named_parameters() if cls is not lowbit.Muon or p.dim() == 2]


def begin(opt: Any) -> Any:
    """The optimizer, ready to step: one with modes is in train mode."""
    if hasattr(opt, "train"):
        opt.train()
    return opt
