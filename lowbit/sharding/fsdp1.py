"""What FSDP1 (FullyShardedDataParallel) has flattened: the original parameters,
their names and where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from lowbit.sharding.flat_shard import FlatShard
from lowbit.sharding.flat_slice import FlatSlice, sections

Clean = Callable[[str], str]  # a name without what wrappers put into it


def flattened_weights(
    model: nn.Module, stored: Iterable[tuple[nn.Module, str]], clean: Clean
) -> list[str]:
    """The original names of those parameters, each a module's and called so there, that FSDP1
    flattened (`use_orig_params=False`).
    """
    wanted = {(id(module), name) for module, name in stored}
    found = []
    for path, handle, flat in _handles(model):
        if handle._use_orig_params:
            continue
        first = {  # the first name of tied weights
            (id(info.prim_module), info.prim_param_name)
            for info in flat._shared_param_infos
            if (id(info.module), info.param_name) in wanted
        }
        for info, fqn in zip(flat._param_infos, flat._fqns, strict=True):
            if (id(info.module), info.param_name) in wanted | first:
                found.append(_original(path, fqn, clean))
    return found


def _handles(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(module's name, handle, flat parameter) of all FSDP1 modules,
    in the same order on all ranks.
    """
    for path, module in model.named_modules():
        # Its own: wrappers such as PEFT's have the attributes of the module inside.
        handle = vars(module).get("_handle")
        flat = getattr(handle, "flat_param", None)
        if flat is not None:
            yield path, handle, flat


def reshard_flat(model: nn.Module) -> None:
    """Gives up the weights that FSDP1 has gathered and holds beyond a pass,
    so that the next pass gathers them again.
    """
    for path, handle, flat in _handles(model):
        begun = hasattr(flat, "_full_param_padded")  # since the first pass
        if begun and handle.uses_sharded_strategy and not handle.needs_unshard():
            from torch.distributed.fsdp._runtime_utils import _reshard

            _reshard(model.get_submodule(path), handle, True)


def _original(path: str, fqn: str, clean: Clean) -> str:
    return clean(f"{path}.{fqn}".removeprefix("."))


def flat_slices_of(model: nn.Module, clean: Clean) -> Iterator[FlatSlice]:
    """The flat slices of all FSDP1 modules, one for each original parameter;
    tied parameters under their first name.
    """
    import torch.distributed as dist

    for path, handle, flat in _handles(model):
        alone = bool(handle._use_orig_params)
        if handle.uses_sharded_strategy:
            group, size = handle.process_group, flat._sharded_size.numel()
            rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        else:
            group, size, rank, ranks = None, flat._unpadded_unsharded_size.numel(), 0, 1
        runs = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        offsets = [run for run, padding in runs if not padding]
        owners = flat._params if alone else [flat] * len(flat._fqns)
        also: dict[str, list[str]] = {}
        for info in flat._shared_param_infos:
            first = f"{info.prim_module_name}.{info.prim_param_name}".removeprefix(".")
            name = f"{info.module_name}.{info.param_name}".removeprefix(".")
            also.setdefault(first, []).append(name)
        for owner, fqn, shape, (begin, _) in zip(
            owners, flat._fqns, flat._shapes, offsets, strict=True
        ):
            tied = tuple(_original(path, name, clean) for name in also.get(fqn, ()))
            ranges = sections(begin, shape.numel(), size, ranks)
            start = None if alone else max(begin - rank * size, 0) if ranges[rank][1] else 0
            yield FlatSlice(
                owner, _original(path, fqn, clean), shape, *ranges[rank], start, group, ranges, tied
            )


def flat_shards_of(model: nn.Module, clean: Clean) -> Iterator[FlatShard]:
    """The flat shards of all FSDP1 modules, as `flat_slices_of` has them."""
    return (each.shard(each.ranges or ()) for each in flat_slices_of(model, clean))
