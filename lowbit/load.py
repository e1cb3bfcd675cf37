"""Checkpoints straight into a live optimizer, sharded or not: torch AdamW's as well as lowbit's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import shard
from lowbit.layout import Entry
from lowbit.optim import STRUCTURE, LowbitOptimizer
from lowbit.overrides import clean_name

# What every optimizer keeps for each parameter; torch's SGD counts no steps.
_KEPT = r"((?:.*\.)?)state\..+\.(?:step|momentum_buffer)$"


def load_optimizer(
    opt: LowbitOptimizer, path: str | os.PathLike[str], *, model: nn.Module | None = None
) -> None:
    """Loads optimizer state from `path` into `opt`, whatever the two are sharded by; torch AdamW's float moments are encoded on the way.

    Args:
        opt: a lowbit optimizer. Its parameters are found by name, so build it from named parameters (`model.named_parameters()`,
            `lowbit.param_groups(model)`), or pass `model`.
        path: a file of `torch.save`, holding an optimizer state dict by itself or under 'optimizer', 'optim' or 'optimizer_state_dict'; or a directory of
            `torch.distributed.checkpoint`, nested or flattened. The file is read with `weights_only=True`; the directory by torch's own reader, which
            trusts its `.metadata`: run `lowbit-ckpt inspect` first on one that you did not write. On a directory every rank must call this.
        model: names parameters where the optimizer does not.

    Raises:
        ValueError: a parameter has no state there, or state of an unknown layout.
        FileNotFoundError: there is nothing at `path`.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        saved: Mapping[str, Any] = _read_directory(opt, path, _names(opt, model))
    elif os.path.exists(path):
        saved = _find(torch.load(path, map_location="cpu", weights_only=True, mmap=True), path)
    else:
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    opt.load_state_dict(_by_index(opt, saved, _names(opt, model)))


def _hyper(opt: LowbitOptimizer) -> list[str]:
    """Group entries that a checkpoint may set: all that the optimizer has but how state is laid out."""
    return ["initial_lr", *(key for key in opt.defaults if key not in STRUCTURE)]


def _names(opt: LowbitOptimizer, model: nn.Module | None) -> list[str] | None:
    """Clean names of the parameters in the optimizer's order, or None."""
    params = [p for group in opt.param_groups for p in group["params"]]
    if all("param_names" in group for group in opt.param_groups):
        return [clean_name(name) for group in opt.param_groups for name in group["param_names"]]
    if model is None:
        return None
    of = {id(p): clean_name(name) for name, p in model.named_parameters()}
    if missing := sum(id(p) not in of for p in params):
        raise ValueError(
            f"{missing} of the optimizer's parameters are not in the model that was given"
        )
    return [of[id(p)] for p in params]


def _find(content: Any, path: str) -> Mapping[str, Any]:
    """The optimizer state dict in what a file holds."""
    places = [content]
    if isinstance(content, Mapping):
        places += [content.get(key) for key in ("optimizer", "optim", "optimizer_state_dict")]
    for place in places:
        if isinstance(place, Mapping) and "state" in place and "param_groups" in place:
            return place
    raise ValueError(
        f"{path} holds no optimizer state dict: expected 'state' and 'param_groups', by themselves or under 'optimizer', 'optim' or "
        "'optimizer_state_dict'"
    )


def _by_index(
    opt: LowbitOptimizer, saved: Mapping[str, Any], names: list[str] | None
) -> dict[str, Any]:
    """A state dict whose parameters are keyed 0, 1, ... in the optimizer's order, from one keyed by number or by name."""
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    count = sum(len(group["params"]) for group in opt.param_groups)
    state: dict[int, Any] = {}
    if all(isinstance(key, str) for key in [*ids, *saved["state"]]) and ids:
        if names is None:
            raise ValueError(
                "the checkpoint names its parameters; pass model=, or build the optimizer from named parameters"
            )
        clean = {clean_name(key): value for key, value in saved["state"].items()}
        origin = {
            clean_name(key): group for group in saved["param_groups"] for key in group["params"]
        }
        if missing := [name for name in names if name not in origin]:
            raise ValueError(
                f"the checkpoint has no parameter {missing[0]!r} ({len(missing)} missing of {count})"
            )
        state = {i: clean[name] for i, name in enumerate(names) if name in clean}
        firsts, at = [], 0
        for group in opt.param_groups:
            firsts.append(origin[names[at]])
            at += len(group["params"])
    else:
        if len(ids) != count:
            raise ValueError(
                f"the checkpoint's optimizer has {len(ids)} parameters, this one {count}"
            )
        state = {i: saved["state"][key] for i, key in enumerate(ids) if key in saved["state"]}
        # torch numbers parameters group by group; the groups themselves may be cut elsewhere here
        origin_of = [group for group in saved["param_groups"] for _ in group["params"]]
        firsts, at = [], 0
        for group in opt.param_groups:
            firsts.append(origin_of[at])
            at += len(group["params"])
    groups, at = [], 0
    for first, group in zip(firsts, opt.param_groups, strict=True):
        size = len(group["params"])
        hyper = {key: first[key] for key in _hyper(opt) if key in first}
        groups.append({**hyper, "params": list(range(at, at + size))})
        at += size
    return {"state": state, "param_groups": groups}


def _read_directory(opt: LowbitOptimizer, path: str, names: list[str] | None) -> dict[str, Any]:
    """The optimizer state dict of a DCP directory, each tensor loaded as its parameter is sharded here."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    prefixes = sorted(
        {match[1] for key in metadata if (match := re.match(_KEPT, key))},
        key=len,
    )
    if not prefixes:
        raise ValueError(
            f"{path} holds no optimizer state (no '...state.<parameter>.step' or '.momentum_buffer')"
        )
    prefix = prefixes[0]
    params = [p for group in opt.param_groups for p in group["params"]]
    head = prefix + "state."
    saved_names: dict[str, list[str]] = {}
    for key in metadata:
        if key.startswith(head):
            name, _, leaf = key[len(head) :].rpartition(".")
            saved_names.setdefault(name, []).append(leaf)
    clean = {clean_name(name): name for name in saved_names}
    numbered = all(name.isdigit() for name in saved_names)
    if names is None and not numbered:
        raise ValueError(
            "the checkpoint names its parameters; pass model=, or build the optimizer from named parameters"
        )
    wanted = (
        [str(i) for i in range(len(params))]
        if numbered
        else [clean.get(name, "") for name in names or ()]
    )
    target: dict[str, Any] = {}
    state: dict[int, dict[str, str]] = {}
    kept = {p: {e.key: e for e in lay.entries()} for _, p, lay in opt._laid_out()}
    for i, (name, p) in enumerate(zip(wanted, params, strict=True)):
        if name not in saved_names:
            continue  # a parameter that was never stepped
        part = shard.part(p, f"parameter {name!r}")
        for leaf in saved_names[name]:
            key = f"{head}{name}.{leaf}"
            entry = metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                own = kept[p].get(leaf)
                target[key] = _room(p, part, tuple(entry.size), entry.properties.dtype, own)
            else:
                target[key] = None
            state.setdefault(i, {})[leaf] = key
    if not state:
        raise ValueError(
            f"{path} holds state of {len(saved_names)} parameters, but of none that this optimizer has"
        )
    group_keys = _group_keys(metadata, prefix, wanted, opt)
    for keys in group_keys:
        target.update({key: None for key in keys.values()})
    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())
    loaded = {i: {leaf: target[key] for leaf, key in keys.items()} for i, keys in state.items()}
    groups, at = [], 0
    for keys, group in zip(group_keys, opt.param_groups, strict=True):
        size = len(group["params"])
        groups.append(
            {
                **{name: target[key] for name, key in keys.items()},
                "params": list(range(at, at + size)),
            }
        )
        at += size
    return {"state": loaded, "param_groups": groups}


def _room(
    p: Tensor, part: shard.Part, size: tuple[int, ...], dtype: torch.dtype, own: Entry | None
) -> Tensor:
    """An empty tensor of global `size`: placed as the optimizer's own of that key, else as p is where it has p's rows, else whole."""
    if not shard.is_sharded(p) or not size:
        return torch.empty(size, dtype=dtype)
    device = shard.local(p).device
    if own is not None and own.shape == size:
        return shard.like(p, torch.empty(own.local, dtype=dtype, device=device), size, own.follows)
    if size == part.shape:
        return shard.like(p, torch.empty(part.local, dtype=dtype, device=device), size)
    if size[0] == part.global_rows and part.whole_rows:
        return shard.like(p, torch.empty((part.rows, *size[1:]), dtype=dtype, device=device), size)
    return torch.empty(size, dtype=dtype)


def _group_keys(
    metadata: Iterable[str], prefix: str, wanted: list[str], opt: LowbitOptimizer
) -> list[dict[str, str]]:
    """For each of the optimizer's groups, where its hyperparameters are in the checkpoint: nested by number, or flattened by parameter."""
    present = set(metadata)
    found, at = [], 0
    for number, group in enumerate(opt.param_groups):
        names = wanted[at : at + len(group["params"])]
        at += len(group["params"])
        keys: dict[str, str] = {}
        for hyper in _hyper(opt):
            for middle in (str(number), *names[:1], "0"):
                key = f"{prefix}param_groups.{middle}.{hyper}"
                if key in present:
                    keys[hyper] = key
                    break
        found.append(keys)
    return found
