"""Wrappers around a module: DistributedDataParallel and fully_shard."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch


def is_ddp(module: Any) -> bool:
    """Whether a module is wrapped in DistributedDataParallel."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def inside_ddp(module: Any) -> bool:
    """Whether the running forward pass belongs to a DistributedDataParallel that contains the
    module and is not it.
    """
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return around is not None and around is not module and module in around.modules()


def is_joined(module: Any) -> bool:
    """Whether DistributedDataParallel.join() was entered, in which a rank without more inputs
    repeats torch's collectives alone. torch leaves it in force after its context.
    """
    config: Any = getattr(module, "_join_config", None)
    return config is not None and config.enable and not config.throw_on_early_termination


def is_replicated(module: Any) -> bool:
    """Whether composable DDP (torch.distributed._composable.replicate) reduces gradients of a
    module: it was called on a part of the module, or on one around it whose forward pass runs.
    """
    imported = sys.modules.get("torch.distributed._composable.replicate")
    kind = getattr(imported, "DDP", None)  # it becomes a base of the module's class
    if kind is None or not kind.__subclasses__():  # no module was replicated
        return False
    if any(isinstance(part, kind) for part in module.modules()):
        return True
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if around is None or not isinstance(around.module, torch.nn.ParameterList):
        return False
    reduced = {id(p) for p in around.parameters()}  # it holds parameters and no modules
    return any(id(p) in reduced for p in module.parameters())


def has_bucket_views(module: Any) -> bool:
    """Whether DDP may leave gradients of a module in its buckets (gradient_as_bucket_view)."""
    return is_replicated(module) or any(
        is_ddp(part) and part.gradient_as_bucket_view for part in module.modules()
    )


def is_fully_sharded(module: Any) -> bool:
    """Whether fully_shard (FSDP2) was called on any part of a module."""
    return any(is_fsdp_module(part) for part in module.modules())


def is_fsdp_module(part: Any) -> bool:
    """Whether fully_shard (FSDP2) was called on a module itself."""
    # Composable DDP has the first alone; replicate_with_fsdp has both, and is FSDP2.
    return hasattr(part, "set_requires_gradient_sync") and hasattr(part, "reshard")


def offloaded(module: Any) -> list[tuple[Any, Any]]:
    """The sharded parameters whose gradients FSDP2 copies to the CPU, each with FSDP2's record of
    it, which has the event of the copy.
    """
    groups = [g for part in module.modules() if is_fsdp_module(part) for g in param_groups(part)]
    records = [record for group in groups for record in group.fsdp_params]
    return [(one.sharded_param, one) for one in records if one.offload_to_cpu]


def param_groups(part: Any) -> list[Any]:
    """FSDP2's groups of the parameters of a module that fully_shard was called on."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.12 and earlier
        groups = [g for g in [state._fsdp_param_group] if g is not None]
    return list(groups)


def reshard(module: Any) -> None:
    """Gives up the weights that FSDP2 has gathered and holds beyond a pass,
    so that the next pass gathers them again.
    """
    for part in module.modules():
        if is_fsdp_module(part):
            part.reshard()


def reshard_owners(params: Collection[Any]) -> None:
    """`reshard` of all modules in which FSDP2 has sharded any of these parameters."""
    states = sys.modules.get("torch.distributed._composable_state")
    for module in list(getattr(states, "_module_state_mapping", ())):
        if is_fsdp_module(module) and any(
            record.sharded_param in params
            for group in param_groups(module)
            for record in group.fsdp_params
        ):
            module.reshard()


def reset_fully_sharded(module: Any) -> bool:
    """Restores FSDP2 after a pass that raised: it shards parameters again and drops sums that were
    never reduced.

    Returns:
        Whether this torch can; FSDPModule.reset_iter_state came with 2.13.
    """
    able = True
    for part in module.modules():
        if not is_fsdp_module(part):
            continue
        if not hasattr(part, "reset_iter_state"):
            able = False
        elif part._get_fsdp_state()._is_root:  # None before the first pass
            before = list(part.parameters())
            part.reset_iter_state()
            now = {id(p) for p in part.parameters()}
            for p in before:
                if id(p) not in now:  # it was unsharded
                    p.grad = None
    return able


def reducer_finished(model: Any) -> bool:
    """Whether the reducer of a DistributedDataParallel has reduced every bucket that it began."""
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def reset_reducer(model: Any) -> None:
    """Restores the reducer of a DistributedDataParallel after a backward pass that raised.

    Call it on every rank: it is a collective if the reducer had begun to reduce.
    """
    import torch.distributed as dist

    if not reducer_finished(model):  # pending reductions write to buckets that the next pass fills
        dist.barrier(model.process_group)
    model.reducer._reset_state()
