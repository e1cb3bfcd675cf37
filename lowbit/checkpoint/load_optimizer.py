"""Checkpoints straight into a live optimizer, sharded or not, whoever wrote them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lowbit import ops, sharding
from lowbit.checkpoint.checkpoint import Checkpoint
from lowbit.checkpoint.contents import Codes, Group, Model, Param, State
from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.match_params import matched
from lowbit.checkpoint.object_store import (
    MISSING,
    Opened,
    StorageOptions,
    is_url,
    local_path,
    location,
)
from lowbit.config.arguments import STRUCTURE
from lowbit.config.hints import outside
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.state.lazy_tensor import LazyTensor
from lowbit.state.load import load_by_param, warn_of_quantized
from lowbit.state.settings import agreed


def load_optimizer(
    opt: LowbitOptimizer,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: str | None = None,
    storage_options: StorageOptions = None,
) -> None:
    """Loads optimizer state from `path` into `opt`, whatever the two are sharded by, and whoever
    wrote it; float moments are quantized on the way.

    Each rank reads only the rows of its own shards, piece by piece and without executing anything,
    into the existing state: nothing else is in memory. Every rank that holds a part of a sharded
    parameter must call this: ranks share scales of whole rows, columns or tensors, and if one of
    them fails, all of them raise, with its `cause`. Ranks without a part in common, such as those
    of DDP, of other pipeline stages and the replicas of FSDP1, do not hear of it.

    Args:
        opt: a lowbit optimizer. Its parameters are found by name, so build it from named parameters
            (`model.named_parameters()`, `lowbit.param_groups(model)`), or pass `model`.
        path: a file of `torch.save` or safetensors, or a directory of
            `torch.distributed.checkpoint`, nested or flattened; the optimizer state dict lies there
            by itself or under a name of its own, such as 'optimizer' or 'optim'. Or the URL of one
            in an object store, such as "s3://bucket/run/step-1000":
            docs/definitions/object-stores.md.
        model: names parameters where the optimizer does not, and tells their order where the
            checkpoint only numbers them: the numbers of one group, as of
            `torch.optim.AdamW(model.parameters())`, are those of `model.parameters()`, all of them
            or the trained ones. Without it, and where the checkpoint has several groups, numbers
            are taken in the optimizer's order; its groups must then have as many parameters.
        optimizer: where the checkpoint has several, the path of the one to load, such as
            "generator" or "optimizers.0"; "" is the top. None (default) loads the only one.
        storage_options: what fsspec opens a URL with, such as `{"endpoint_url": ...}`.

    Warns as `load_state_dict` does: of a checkpoint without state, of float32 state that is
    quantized here, and of settings in which the groups that come together here differ.

    Raises:
        TypeError: `opt` is not an optimizer of lowbit, `path` not a path, or `optimizer` not text.
        ValueError: the checkpoint has several optimizers and `optimizer` is None, or none under
            that name; a parameter has no state there, or state of an unknown layout; or it cannot
            be known which parameter is which. Nothing was changed.
        CheckpointError: the checkpoint is damaged, or another rank could not load it. Where that
            shows only while values are read, some of them are loaded already: load another
            checkpoint, or build a new optimizer.
        FileNotFoundError: there is nothing at `path`.
        ImportError: lowbit was built without its checkpoint module.
    """
    if not isinstance(opt, LowbitOptimizer):
        raise TypeError(
            "load_optimizer loads into an optimizer of lowbit, such as lowbit.AdamW, not into "
            f"{_kind(opt)}"
        )
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"load_optimizer takes the path of a checkpoint, not {_kind(path)}; "
            "opt.load_state_dict takes a state dict"
        )
    if optimizer is not None and not isinstance(optimizer, str):
        raise TypeError(
            "optimizer= takes a name of an optimizer in the checkpoint, such as 'optimizers.0', "
            f"not {_kind(optimizer)}"
        )
    is_url(path)  # refuses a URL that went through pathlib
    name = os.fspath(path)
    with opt.whole_groups():  # DeepSpeed's stage 3 empties them between steps
        params = [member.p for member in opt.members()]
        with sharding.SharedFailure(params, partial(_failed_elsewhere, name)).together() as shared:
            _load(opt, name, model, optimizer, storage_options, shared)


def _failed_elsewhere(path: str | bytes, rank: int, cause: str) -> CheckpointError:
    return CheckpointError(
        f"{os.fsdecode(path)}: rank {rank} failed to load its part; its own error says why. "
        "Another checkpoint, or a new optimizer, serves all ranks",
        code=3 if cause else 1,
        cause=cause,
    )


def _load(
    opt: LowbitOptimizer,
    path: str,
    model: nn.Module | None,
    optimizer: str | None,
    storage_options: StorageOptions,
    shared: sharding.SharedFailure,
) -> None:
    remote = is_url(path)
    if remote:
        with Opened(path, storage_options) as name:
            # What lies inside a zip is not an object of the store.
            there = ".zip/" in os.fsdecode(path) or location(name).info("").kind != MISSING
    else:
        there = _exists(local_path(path))
    if not there:
        raise FileNotFoundError(
            f"there is no checkpoint at {path}"
            + ("" if os.path.isabs(path) or remote else f" in {os.getcwd()}")
        )
    checkpoint = Checkpoint(path, storage_options, optimizer)
    saved = _model_of(checkpoint, optimizer)
    params, numbered = matched(opt, saved, model, checkpoint.path)
    params = _with_shapes(opt, checkpoint, params)
    try:
        load_by_param(opt, *_states_and_settings(opt, checkpoint, params), shared)
    except ValueError as error:
        if not numbered:
            raise
        advice = "" if model else "; pass model= where they are in the order of the model"
        raise ValueError(
            f"{error}; {path} numbers its parameters, and they were taken in this optimizer's "
            f"order{advice}"
        ) from error
    _warn_of_quantized(opt, checkpoint, params)
    checkpoint.finish()


def _with_shapes(
    opt: LowbitOptimizer, checkpoint: Checkpoint, params: Sequence[Param | None]
) -> list[Param | None]:
    """The same parameters, of which those that the checkpoint does not tell the shape of have that
    of the optimizer's.
    """
    place_of = {id(param): i for i, param in enumerate(checkpoint.params)}
    places = [None if param is None else place_of[id(param)] for param in params]
    untold = {
        place: tuple(p.shape)
        for (_, p, _, _), param, place in zip(opt.members(), params, places, strict=True)
        if param is not None and place is not None and param.shape is None and param.states
    }
    if not untold:
        return list(params)
    checkpoint.tell_shapes(untold)
    with _value_error_unless_damaged():
        known = checkpoint.params
    return [None if place is None else known[place] for place in places]


@contextmanager
def _value_error_unless_damaged() -> Iterator[None]:
    """What a whole checkpoint does not say is an argument's fault, and damage is the file's."""
    try:
        yield
    except CheckpointError as error:
        if error.file:
            raise
        raise ValueError(str(error)) from error


def _warn_of_quantized(
    opt: LowbitOptimizer, checkpoint: Checkpoint, params: Sequence[Param | None]
) -> None:
    """As `load_state_dict` does, by the groups of the checkpoint."""
    number_of = {id(param): i for i, param in enumerate(checkpoint.params)}
    groups = [{**group.settings, "params": group.params} for group in checkpoint.model.groups]
    known = {i for group in groups for i in group["params"]}
    coded = [
        (number_of[id(param)], name)
        for (_, _, name, _), (_, _, layout), param in zip(
            opt.members(), opt.laid_out(), params, strict=True
        )
        if param is not None and any(slot.coded for slot in layout.slots)
    ]
    warn_of_quantized([each for each in coded if each[0] in known], groups)


def _exists(path: bytes) -> bool:
    """Whether there is something at a path, or a file on the way to it: a zip,
    in which the reader looks.
    """
    try:
        os.lstat(path)
    except NotADirectoryError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hyper(opt: LowbitOptimizer) -> list[str]:
    """Group entries that a checkpoint may set: all that the optimizer has but how state is laid
    out.
    """
    return ["initial_lr", *(key for key in opt.defaults if key not in STRUCTURE)]


def _model_of(checkpoint: Checkpoint, optimizer: str | None) -> Model:
    """What the optimizer state means; ValueError where it is not known which one is meant,
    or whose it is.
    """
    roots = checkpoint.optimizers
    if not roots:
        raise ValueError(
            f"{checkpoint.path} holds no optimizer state dict: expected 'state' and "
            "'param_groups', by themselves or under a name such as 'optimizer' or 'optim'"
        )
    names = ", ".join(sorted(map(repr, roots)))
    if optimizer is None and len(roots) > 1:
        raise ValueError(
            f"{checkpoint.path} holds {len(roots)} optimizers, {names}: "
            "optimizer= says which one to load"
        )
    if optimizer is not None and optimizer not in roots:
        raise ValueError(
            f"{checkpoint.path} holds no optimizer under {optimizer!r}; "
            f"those that it holds: {names}"
        )
    with _value_error_unless_damaged():
        model = checkpoint.model
    if model.refusal:
        raise ValueError(f"{checkpoint.path}: {model.refusal}")
    return model


def _states_and_settings(
    opt: LowbitOptimizer, checkpoint: Checkpoint, params: Sequence[Param | None]
) -> tuple[list[dict[str, Any] | None], list[dict[str, Any]]]:
    """What `load_by_param` takes; tensors are still in the checkpoint.

    Args:
        params: of the checkpoint, for each of the optimizer's members.
    """
    groups = checkpoint.model.groups
    settings = [_settings(checkpoint, g, group, opt.defaults) for g, group in enumerate(groups)]
    of = {
        id(checkpoint.params[i]): settings[g]
        for g, group in enumerate(groups)
        for i in group.params
    }
    sources: dict[int, list[dict[str, Any]]] = {}  # settings for each group
    for (number, _, _, _), param in zip(opt.members(), params, strict=True):
        if id(param) in of:
            sources.setdefault(number, []).append(of[id(param)])
    made = []
    for number, group in enumerate(opt.param_groups):
        known = sources.get(number)
        if known is None and settings and not checkpoint.model.flattened:
            known = [settings[number] if number < len(settings) else settings[0]]
        # a file without groups
        kept = {key: value for key, value in group.items() if key != "params"}
        made.append(agreed(number, group, known, _hyper(opt), opt.counted) if known else kept)
    states = [None if param is None else _state_of(checkpoint, param) for param in params]
    return states, made


def _settings(
    checkpoint: Checkpoint, number: int, group: Group, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """A group's settings: tensors where the file has tensors, tuples where the optimizer has them.
    None that stands for a number is left out.
    """
    made = {
        key: tuple(value)
        if isinstance(defaults.get(key), tuple) and isinstance(value, list)
        else value
        for key, value in group.settings.items()
        if value is not None or defaults.get(key) is None or isinstance(defaults[key], bool)
    }
    if missing := sorted(group.settings.keys() - made.keys()):
        warnings.warn(
            f"group {number} of {checkpoint.path} has None for {', '.join(missing)}: this "
            "optimizer keeps its own",
            stacklevel=outside(),
        )
    for path, name in group.tensors:
        if path[0] in made:
            made = _put(made, path, _lazy_tensor(checkpoint, name).tensor())
    return made


def _put(into: Any, path: Sequence[str | int], value: Any) -> Any:
    """A copy of nested dicts, lists and tuples with a value at the end of the path."""
    if not path:
        return value
    key, *rest = path
    if isinstance(into, dict):
        return {**into, key: _put(into[key], rest, value)}
    return type(into)(_put(item, rest, value) if i == key else item for i, item in enumerate(into))


def _state_of(checkpoint: Checkpoint, param: Param) -> dict[str, Any]:
    """A parameter's state under lowbit's keys: the very tensors where the file has them, else
    values, and codes where they are ours bit for bit.
    """
    made: dict[str, Any] = {
        name: torch.tensor(value, dtype=torch.float32, device="cpu")
        if isinstance(value, float) and name != "step"
        else value
        for name, value in param.numbers.items()
        if name != "apollo_rank"  # says to the reader that the state is of a subspace
    }
    for state in param.states:
        for own in state.own:
            read = partial(checkpoint.read_own_box, state, own)
            made[own.key] = LazyTensor(getattr(torch, own.dtype), own.shape, read)
        if state.own:
            continue
        read = partial(checkpoint.read_state_box, state)
        made[state.name] = LazyTensor(torch.float32, state.shape, read)
        # In rows of the parameter, or they are of another grid of blocks.
        if state.codes is not None and state.codes.rows == (*state.shape, 1)[0]:
            made |= _codes(checkpoint, state, state.codes)
    return made


def _codes(checkpoint: Checkpoint, state: State, codes: Codes) -> dict[str, LazyTensor]:
    """Codes and scales under the keys that lowbit keeps them by."""
    info = ops.state_format(codes.format)
    made: dict[str, LazyTensor] = {}
    if not info["scaled"]:
        return made  # nothing is lost by its values
    for end, dtype, width, scales in (
        ("", info["dtype"], -(-codes.cols * codes.bits // 8), False),
        (
            "_scale",
            info["scale_dtype"],
            -(-codes.cols // codes.block) * info["scale_numbers"],
            True,
        ),
    ):
        kind = getattr(torch, dtype)

        def read(
            offset: tuple[int, ...],
            shape: tuple[int, ...],
            kind: Any = kind,
            width: int = width,
            scales: bool = scales,
        ) -> bytearray:
            rows = checkpoint.read_codes(state, offset[0], offset[0] + shape[0], scales=scales)
            if shape[1] == width:
                return rows
            matrix = torch.frombuffer(rows, dtype=kind).reshape(shape[0], width)
            cut = bytearray(shape[0] * shape[1] * kind.itemsize)
            columns = matrix[:, offset[1] : offset[1] + shape[1]]
            torch.frombuffer(cut, dtype=kind).reshape(shape).copy_(columns)
            return cut

        name = f"{state.name}_{codes.format}{end}"
        made[name] = LazyTensor(kind, (codes.rows, width), read)
    return made


def _lazy_tensor(checkpoint: Checkpoint, name: str) -> LazyTensor:
    tensor = checkpoint.tensors[name]
    return LazyTensor(
        getattr(torch, tensor.dtype), tensor.shape, partial(checkpoint.read_box, name)
    )
