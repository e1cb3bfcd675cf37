"""Parameters that a wrapper has replaced in an optimizer's groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbit import sharding


def replaced(opt: Any, here: set[Tensor]) -> list[Tensor]:
    """The parameters with state that are no longer in the groups. Those of a group that was removed
    itself keep it, once they were stepped.

    Args:
        here: the parameters that are.

    Raises:
        RuntimeError: one of them had been stepped,
            or they became flat partitions that are not bound.
    """
    gone = _gone(opt, here)
    _check_bound(opt, here, gone)
    for p in gone:
        if steps_of(opt.state[p]) > 0:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} was replaced in the optimizer's groups "
                "after it had been stepped, and its state cannot follow; wrap or shard the model "
                "first, then load the checkpoint"
            )
    return gone


def check_bound(opt: Any) -> None:
    """Raises RuntimeError if the groups hold flat partitions that are not bound, into which a load
    would put state of other shapes and names.
    """
    here = {p for group in opt.param_groups for p in group["params"]}
    _check_bound(opt, here, _gone(opt, here))


def _gone(opt: Any, here: set[Tensor]) -> list[Tensor]:
    """The parameters with state that are not in the groups, where others without are."""
    if not any(p.requires_grad and not opt.state.get(p) for p in here):
        return []  # not replaced
    removed = {p for p in opt.structure.removed if steps_of(opt.state.get(p, {})) > 0}
    return [p for p in opt.state if isinstance(p, Tensor) and p not in here and p not in removed]


def _check_bound(opt: Any, here: set[Tensor], gone: list[Tensor]) -> None:
    unbound = [q for q in here if q not in opt.flat_shards]
    if unbound and all(map(_is_vector, here)) and any(p.dim() > 1 for p in gone):
        raise RuntimeError(
            "the optimizer's groups hold flat partitions in place of its parameters, as "
            "DeepSpeed's ZeRO (stages 1, 2 and 3) sets them: float32 vectors of many parameters "
            "each, which hide the shapes and names that the layout of state needs. Call "
            "lowbit.integrations.deepspeed.bind(engine) after deepspeed.initialize, or "
            "lowbit.flat.bind for partitions of another library"
        )


def _is_vector(p: Tensor) -> bool:
    return p.dim() == 1 and not (sharding.is_sharded(p) or sharding.is_flat(p))


def steps_of(state: Mapping[str, Any]) -> float:
    """The step count of a parameter, or the largest of the original ones in a flattened one."""
    inside = [steps_of(values) for values in state.values() if isinstance(values, dict)]
    return max([float(state.get("step", 0.0)), *inside])
