"""A state dict put into a live optimizer: the groups' settings merged, and each parameter's state adopted."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from lowbit import shard
from lowbit.adopt import Adoption, adopt_state, holds, is_stored
from lowbit.options import STRUCTURE

if TYPE_CHECKING:
    from lowbit.layout import Layout
    from lowbit.state import StateKeeper


@torch.no_grad()
def restore(opt: StateKeeper, state_dict: dict[str, Any]) -> None:
    """`StateKeeper.load_state_dict`. Nothing is changed before all of it is known to fit."""
    state_dict = state_dict.copy()
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(opt, state_dict)
        if changed is not None:
            state_dict = changed
    saved = deepcopy(state_dict["param_groups"])
    groups = _groups(opt, saved)
    laid_out = _laid_out(opt, groups)
    ids = [key for group in saved for key in group["params"]]
    owners = [p for group in groups for p in group["params"]]
    key_of = dict(zip(owners, ids, strict=True))
    adopted: list[tuple[Any, Adoption, bool]] = []
    for _, p, lay in laid_out:
        piece = isinstance(p, shard.Piece)
        key = key_of[p.owner if piece else p]
        value = state_dict["state"].get(key, {})
        if piece and not p.alone:
            value = value.get(p.name, {})
        if value:
            in_place = is_stored(value) or holds(value, opt._state_of(p))
            adopted.append((p, adopt_state(p, lay, value, key, opt.state_memory), in_place))
    known = set(ids)
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({k: value for k, value in state_dict["state"].items() if k not in known})
    opt._lay_out_again()  # a step that is prepared holds what is here
    for p, adopt, in_place in adopted:  # all of them fit
        made = adopt(opt._state_of(p) if in_place else {})
        opt._keep(p, made, state)
        opt._keep(p, made)  # what was here is free before the next is made
    loaded = {p for p, _, _ in adopted}
    for group, p, lay in laid_out:
        if p.requires_grad and not p.is_meta and p not in loaded:
            opt._keep(p, opt._fresh(group, p, lay), state)
    opt.__setstate__({"state": state, "param_groups": groups})
    for post_hook in opt._optimizer_load_state_dict_post_hooks.values():
        post_hook(opt)


def _groups(opt: StateKeeper, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups with the saved settings, in torch's words where the two are cut otherwise."""
    if len(saved_groups) != len(opt.param_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    made = []
    for saved, group in zip(saved_groups, opt.param_groups, strict=True):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        own = {key: group[key] for key in STRUCTURE if key in group}
        saved = {key: value for key, value in saved.items() if key not in STRUCTURE}
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        made.append({**group, **saved, **own, **names, "params": group["params"]})
    return made


def _laid_out(
    opt: StateKeeper, groups: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], Any, Layout]]:
    """Every parameter with its group and layout as they will be: the rule follows the loaded settings."""
    before = opt.param_groups, opt._layouts
    opt.param_groups, opt._layouts = groups, {}
    try:
        return list(opt._laid_out())
    finally:
        opt.param_groups, opt._layouts = before
