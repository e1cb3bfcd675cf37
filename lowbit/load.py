"""Checkpoints straight into a live optimizer, sharded or not, whoever wrote them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lowbit import ops, shard
from lowbit.checkpoint import CheckpointError
from lowbit.optim import LowbitOptimizer
from lowbit.options import STRUCTURE
from lowbit.overrides import clean_name
from lowbit.reader import Checkpoint, Codes, Model, State
from lowbit.stored import Stored

# What every optimizer keeps for each parameter; torch's SGD counts no steps.
_KEPT = re.compile(r"((?:.*?\.)?)state\..+\.(?:step|momentum_buffer)$")
_GROUPS = re.compile(r"((?:(?:optim|optimizer|optimizer_state_dict)\.)?)param_groups(?:\.|$)")
_OWN = ("torch", "lowbit")  # dialects that load_state_dict knows by itself


def load_optimizer(
    opt: LowbitOptimizer, path: str | os.PathLike[str], *, model: nn.Module | None = None
) -> None:
    """Loads optimizer state from `path` into `opt`, whatever the two are sharded by, and whoever wrote it; float moments are encoded on the way.

    Each rank reads only the rows of its own shards, piece by piece and without executing anything, into the state that is there: nothing else is
    in memory. Where state is kept under scales of whole rows, columns or tensors, every rank must call this, since the scales are shared.

    Args:
        opt: a lowbit optimizer. Its parameters are found by name, so build it from named parameters (`model.named_parameters()`,
            `lowbit.param_groups(model)`), or pass `model`.
        path: a file of `torch.save` or safetensors, or a directory of `torch.distributed.checkpoint`, nested or flattened; the optimizer state
            dict lies there by itself or under a name of its own, such as 'optimizer' or 'optim'.
        model: names parameters where the optimizer does not.

    Raises:
        ValueError: a parameter has no state there, or state of an unknown layout; nothing was changed.
        CheckpointError: the checkpoint is damaged. Where that shows only while values are read, some of them are loaded already: load another
            checkpoint, or build the optimizer anew.
        FileNotFoundError: there is nothing at `path`.
        ImportError: lowbit was built without its checkpoint module.
    """
    path = os.fspath(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    checkpoint = Checkpoint(path)
    opt.load_state_dict(_Saved(checkpoint).state_dict(opt, _names(opt, model)))
    checkpoint.finish()


def _hyper(opt: LowbitOptimizer) -> list[str]:
    """Group entries that a checkpoint may set: all that the optimizer has but how state is laid out."""
    return ["initial_lr", *(key for key in opt.defaults if key not in STRUCTURE)]


def _names(opt: LowbitOptimizer, model: nn.Module | None) -> list[str] | None:
    """Clean names of the parameters in the optimizer's order, original ones in place of flattened, or None."""
    if opt._pieces:
        members = list(opt._members())
        known = [p.name if isinstance(p, shard.Piece) else name for _, p, name, _ in members]
        return None if None in known else [clean_name(str(name)) for name in known]
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


class _Saved:
    """The optimizer state of a checkpoint: what it has for each parameter, by name or number, and the settings of its groups."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self._lists: dict[str, dict[int, Any]] = {}
        self.reason: CheckpointError | None = None
        self.state: dict[str, dict[str, Any]] = {}
        self.groups: dict[int, dict[str, Any]] = {}  # settings, with "params" where it is known
        self.named: dict[str, dict[str, Any]] = {}  # settings of a flattened one, by parameter
        try:
            known: Model | None = checkpoint.model
        except CheckpointError as error:  # of no dialect: then what it holds is said below
            known, self.reason = None, error
        if known is not None and known.dialect not in _OWN:
            self._from(known, checkpoint)
            return
        leaves: dict[str, Any] = {**checkpoint.values, **_stored(checkpoint)}
        root = self._root(leaves)
        for name, value in leaves.items():
            rest = name.removeprefix(root)
            if name.startswith(root + "state."):
                owner, _, leaf = rest.removeprefix("state.").rpartition(".")
                self.state.setdefault(owner, {})[leaf] = value
            elif rest == "param_groups" and isinstance(value, list):
                self.groups.update(enumerate(value))
            elif rest.startswith("param_groups."):
                self._setting(rest.removeprefix("param_groups."), value)
        for name, items in self._lists.items():
            self._setting(name, tuple(items[i] for i in sorted(items)))

    def _from(self, model: Model, checkpoint: Checkpoint) -> None:
        """The state of another library, under our names: values, and codes where they are ours bit for bit."""
        owners = [p.name or str(p.index) for p in model.params]
        for number, (settings, members) in enumerate(model.groups):
            self.groups[number] = {**settings, "params": [owners[i] for i in members]}
        for owner, param in zip(owners, model.params, strict=True):
            leaves: dict[str, Any] = dict(param.numbers)
            for state in param.states:
                read = partial(checkpoint.read_state_box, state)
                leaves[state.name] = Stored(torch.float32, state.shape, read)
                # In rows of the parameter, or they are of another grid of blocks.
                if state.codes is not None and state.codes.rows == (*state.shape, 1)[0]:
                    leaves |= _codes(checkpoint, state, state.codes)
            self.state[owner] = leaves

    def _root(self, leaves: Iterable[str]) -> str:
        """What comes before 'state.' and 'param_groups.' in the names."""
        found = {m[1] for name in leaves for m in (_KEPT.match(name), _GROUPS.match(name)) if m}
        if not found:
            raise ValueError(
                f"{self.path} holds no optimizer state dict: expected 'state' and 'param_groups', by themselves or under a name such as 'optimizer' or "
                "'optim'"
            ) from self.reason
        with_groups = {
            root for root in found if any(n.startswith(root + "param_groups") for n in leaves)
        }
        found = with_groups or found
        if len(found) > 1:
            raise ValueError(
                f"{self.path} holds {len(found)} optimizers, {', '.join(sorted(repr(r[:-1]) for r in found))}: which one is meant cannot be told; "
                "save them apart"
            )
        return found.pop()

    def _setting(self, name: str, value: Any) -> None:
        """Files a leaf below 'param_groups.'."""
        if isinstance(value, Stored):  # such as a learning rate
            value = value.tensor()
        if item := re.fullmatch(r"(.+)\.(\d+)", name):  # of a list or tuple, filed by itself
            self._lists.setdefault(item[1], {})[int(item[2])] = value
            return
        owner, _, key = name.rpartition(".")
        if owner.isdigit():
            self.groups.setdefault(int(owner), {})[key] = value
        else:
            self.named.setdefault(clean_name(owner), {})[key] = value

    def state_dict(self, opt: LowbitOptimizer, names: list[str] | None) -> dict[str, Any]:
        """A state dict whose parameters are keyed 0, 1, ... in the optimizer's order; its tensors are still in the checkpoint."""
        members = list(opt._members())
        params = [p for _, p, _, _ in members]
        flattened = any(isinstance(p, shard.Piece) and not p.alone for p in params)
        count, groups = len(params), [self.groups[i] for i in sorted(self.groups)]
        ids = [str(key) for group in groups for key in group.get("params", ())]
        named = [clean_name(n) for group in groups for n in group.get("param_names", ())]
        if names is not None and ids and len(named) == len(ids) and all(map(str.isdigit, ids)):
            by_id = dict(zip(ids, named, strict=True))  # groups may be cut otherwise here
            self.state = {by_id.get(key, key): value for key, value in self.state.items()}
            groups = [{**g, "params": [by_id[str(key)] for key in g["params"]]} for g in groups]
            ids = named
        keys = ids or list(self.named) or list(self.state)
        of: dict[str, dict[str, Any]] = {}  # the settings of each parameter that has any
        for group in groups:
            of.update({clean_name(str(key)): group for key in group.get("params", ())})
        of.update(self.named)
        if keys and all(key.isdigit() for key in keys) and not flattened:
            if ids and len(ids) != count:
                raise ValueError(
                    f"the checkpoint's optimizer has {len(ids)} parameters, this one {count}"
                )
            # torch numbers parameters group by group; the groups themselves may be cut elsewhere here
            wanted = ids or [str(i) for i in range(count)]
        elif names is None:
            raise ValueError(
                "the checkpoint names its parameters; pass model=, or build the optimizer from named parameters"
            )
        else:
            wanted = names
            known = {*of, *map(clean_name, self.state)}
            missing = [n for n, p in zip(names, params, strict=True) if n not in known and p.requires_grad]  # fmt: skip
            if missing:
                raise ValueError(
                    f"the checkpoint has no parameter {missing[0]!r} ({len(missing)} missing of {count})"
                )
        clean = {clean_name(name): leaves for name, leaves in self.state.items()}
        state: dict[int, Any] = {}
        first: dict[int, str] = {}  # of each group
        for (number, p, _, index), name in zip(members, wanted, strict=True):
            first.setdefault(number, name)
            if name in clean and isinstance(p, shard.Piece) and not p.alone:
                state.setdefault(index, {})[p.name] = clean[name]
            elif name in clean:
                state[index] = clean[name]
        made, at = [], 0
        for number, group in enumerate(opt.param_groups):
            size = len(group["params"])
            settings = of.get(first[number]) if size else None
            if settings is None:
                settings = self.groups.get(number, self.groups.get(0, {}))
            hyper = {key: settings[key] for key in _hyper(opt) if key in settings}
            made.append({**hyper, "params": list(range(at, at + size))})
            at += size
        return {"state": state, "param_groups": made}


def _codes(checkpoint: Checkpoint, state: State, codes: Codes) -> dict[str, Stored]:
    """Codes and scales under the keys that lowbit keeps them by."""
    info = ops.state_format(codes.format)
    made: dict[str, Stored] = {}
    if not info["scaled"]:
        return made  # nothing is lost by its values
    for end, dtype, width, scales in (
        ("", info["dtype"], -(-codes.cols * codes.bits // 8), False),
        ("_scale", info["scale_dtype"], -(-codes.cols // codes.block) * info["scale_numbers"], True),
    ):  # fmt: skip
        kind = getattr(torch, dtype)

        def read(
            offset: tuple[int, ...], shape: tuple[int, ...], kind: Any = kind, width: int = width, scales: bool = scales
        ) -> bytearray:  # fmt: skip
            rows = checkpoint.read_codes(state, offset[0], offset[0] + shape[0], scales=scales)
            if shape[1] == width:
                return rows
            matrix = torch.frombuffer(rows, dtype=kind).reshape(shape[0], width)
            cut = bytearray(shape[0] * shape[1] * kind.itemsize)
            columns = matrix[:, offset[1] : offset[1] + shape[1]]
            torch.frombuffer(cut, dtype=kind).reshape(shape).copy_(columns)
            return cut

        name = f"{state.name}_{codes.format}{end}"
        made[name] = Stored(kind, (codes.rows, width), read)
    return made


def _stored(checkpoint: Checkpoint) -> dict[str, Stored]:
    """The tensors of a checkpoint, each as far as torch has its dtype."""
    made = {}
    for name, tensor in checkpoint.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if isinstance(dtype, torch.dtype) and not tensor.cls:
            made[name] = Stored(dtype, tensor.shape, partial(checkpoint.read_box, name))
    return made
