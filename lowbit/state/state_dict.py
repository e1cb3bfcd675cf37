"""Errors about what is not an optimizer's state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lowbit.state.settings import some


def check_type(state_dict: Any) -> None:
    """Raises TypeError unless this is a dict."""
    if isinstance(state_dict, Mapping):
        return
    instead = ""
    if isinstance(state_dict, (str, os.PathLike)):
        instead = ": lowbit.load_optimizer(opt, path) reads a file"
    elif hasattr(state_dict, "state_dict"):
        instead = ": call its state_dict()"
    raise TypeError(
        f"load_state_dict takes the dict that state_dict() returns, not "
        f"{type(state_dict).__name__}{instead}"
    )


def check_entries(state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError unless this has the state and the settings of an optimizer."""
    _check_keys(state_dict)
    _check_settings(state_dict)


def _check_keys(state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError unless this is an optimizer's state dict;
    the message has the key of the one inside a checkpoint.
    """
    if "state" in state_dict and "param_groups" in state_dict:
        return
    found = [f"[{key!r}]" for key, value in state_dict.items() if _is_state_dict(value)]
    for key, value in state_dict.items():  # such as Lightning's optimizer_states
        if isinstance(value, list | tuple):
            found += [f"[{key!r}][{i}]" for i, one in enumerate(value) if _is_state_dict(one)]
    lacking = [key for key in ("state", "param_groups") if key not in state_dict]
    holds = f"it holds {some(state_dict)} and no {' or '.join(map(repr, lacking))}"
    if found:
        calls = " or ".join(f"load_state_dict(checkpoint{where})" for where in found)
        raise ValueError(
            f"this is a whole checkpoint, not an optimizer's state dict: {holds}. Call {calls}"
        )
    if state_dict and all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise ValueError(
            f"this is the state dict of a model, not of an optimizer: {holds}. Load it with "
            "model.load_state_dict"
        )
    raise ValueError(
        f"this is not an optimizer's state dict: {holds}. Save optimizer.state_dict() and load "
        "what was saved"
    )


def _check_settings(state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError if a group has state for its parameters and no settings,
    not even a learning rate.

    torch leaves them out where the groups of a checkpoint name none of these parameters.
    """
    for number, group in enumerate(state_dict["param_groups"]):
        keys = group.get("params", ())
        if set(group) == {"params"} and any(state_dict["state"].get(key) for key in keys):
            raise ValueError(
                f"group {number} of the state dict has state for {some(keys)} and no settings: its "
                "param_groups were another rank's. torch.distributed.checkpoint keeps those of "
                "one rank where ranks save different parameters under nested names, as stages of "
                "a pipeline. Save and load flat names: "
                "StateDictOptions(flatten_optimizer_state_dict=True). To load this checkpoint "
                "with the settings that the optimizer has now, put "
                "get_optimizer_state_dict(model, opt)['param_groups'] instead of its own"
            )


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value
