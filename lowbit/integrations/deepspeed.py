"""DeepSpeed: ZeRO's stages 1, 2 and 3 with a lowbit optimizer as the client optimizer.

    from lowbit.integrations import deepspeed as lowbit_deepspeed
    opt = lowbit.AdamW(lowbit.param_groups(model))
    engine, *_ = lowbit_deepspeed.initialize(model=model, optimizer=opt, config=config)

The configuration needs `"zero_allow_untested_optimizer": true`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from lowbit import flat, sharding
from lowbit.flat import FlatSlice
from lowbit.optim.optimizer import LowbitOptimizer


def initialize(*args: Any, export: str | None = None, **keywords: Any) -> tuple[Any, ...]:
    """`deepspeed.initialize` and then `bind`,
    so that what is not supported raises here and not in the first step.

    Args:
        args, keywords: those of `deepspeed.initialize`.
        export: as in `bind`.

    Returns:
        What `deepspeed.initialize` returns: engine, optimizer, data loader and scheduler.

    Raises:
        TypeError, ValueError, RuntimeError: as in `bind`.
    """
    import deepspeed

    made: tuple[Any, ...] = deepspeed.initialize(*args, **keywords)
    bind(made[0], export=export)
    return made


# `export` of each optimizer that waits.
_waiting: weakref.WeakKeyDictionary[LowbitOptimizer, str | None] = weakref.WeakKeyDictionary()


def bind_when_initialized(opt: LowbitOptimizer, *, export: str | None = None) -> None:
    """Makes `deepspeed.initialize` bind an optimizer when it is called with it as `optimizer=`.

    For programs that call `deepspeed.initialize` themselves and load a checkpoint right after it,
    before any code of the user's runs, as Trainer does. From then on `deepspeed.initialize` is
    lowbit's wrapper, which ignores other optimizers. It raises RuntimeError for one that replaces
    lowbit's, as accelerate does under offload.

    Args:
        opt: the optimizer.
        export: as in `bind`.
    """
    import deepspeed

    _waiting[opt] = export
    initialize_only = deepspeed.initialize
    if hasattr(initialize_only, "binds_waiting"):
        return

    signature = inspect.signature(initialize_only)

    @functools.wraps(initialize_only)
    def initialize_and_bind(*args: Any, **keywords: Any) -> tuple[Any, ...]:
        given = signature.bind(*args, **keywords).arguments.get("optimizer")
        _check_not_replaced(given)
        made: tuple[Any, ...] = initialize_only(*args, **keywords)
        if isinstance(given, LowbitOptimizer) and given in _waiting:
            bind(made[0], export=_waiting.pop(given))
        return made

    initialize_and_bind.binds_waiting = True  # type: ignore[attr-defined]
    deepspeed.initialize = initialize_and_bind


def _check_not_replaced(given: Any) -> None:
    """Raises RuntimeError if an optimizer steps the parameters of another that waits."""
    if isinstance(given, LowbitOptimizer):
        return
    stepped = {id(p) for group in getattr(given, "param_groups", ()) for p in group["params"]}
    for opt in _waiting:
        if any(id(p) in stepped for group in opt.param_groups for p in group["params"]):
            raise RuntimeError(
                f"deepspeed.initialize was given {type(given).__name__} in place of "
                f"lowbit.{type(opt).__name__}. accelerate replaces optimizers where the "
                'configuration offloads them: set "zero_force_ds_cpu_optimizer": false in it'
            )


def bind(engine: Any, *, export: str | None = None) -> None:
    """Binds the engine's optimizer to the parameters that ZeRO has cut into flat partitions.

    Call it on every rank after `deepspeed.initialize`, before the first step or load. State then
    follows the parameters' names and shapes; weights and state are the bits of one process that
    steps float32 weights with the same gradients. `engine.save_checkpoint` and `load_checkpoint`
    work with the same number of ranks, `lowbit.flat.get_state_dict` and
    `torch.distributed.checkpoint` with any. Without ZeRO's partitions, as in stage 0, there is
    nothing to do.

    Args:
        engine: what `deepspeed.initialize` returned.
        export: "fp32" makes checkpoints hold float32 moments in the shape of the partitions, as
            those of torch's AdamW do. None (default) keeps the quantized state.

    Raises:
        TypeError: `engine` is not an engine of DeepSpeed, or its optimizer is not one of lowbit's.
        ValueError: what is configured is not supported, such as NVMe offload; the rule needs whole
            matrices; or `export` is given, and there are no partitions.
        RuntimeError: the optimizer was stepped before.
    """
    if not hasattr(engine, "optimizer"):
        raise TypeError(
            f"bind takes the engine that deepspeed.initialize returned, not {type(engine).__name__}"
        )
    zero = engine.optimizer
    opt = getattr(zero, "optimizer", zero)
    if not isinstance(opt, LowbitOptimizer):
        raise TypeError(
            f"the engine's optimizer is {type(opt).__name__}; pass one of lowbit's to "
            "deepspeed.initialize(optimizer=...)"
        )
    slices = list(_slices(zero))
    if not slices:
        if export is not None:
            raise ValueError(
                f"export={export!r} is for the flat partitions of ZeRO, and this engine has none: "
                "leave it out, or use stage 1, 2 or 3"
            )
        return
    if refused := _refused(engine, zero):
        raise ValueError(f"lowbit does not support DeepSpeed's {refused}")
    _check_weights(opt)
    held = _groups(zero, opt)
    shown = [group["params"] for group in opt.param_groups]
    names = [group.pop("param_names", None) for group in opt.param_groups]  # slices have them
    for group, tensors in zip(opt.param_groups, held, strict=True):
        group["params"] = tensors
    try:
        flat.bind(opt, slices, export=export, by_parts=True)
    except BaseException:
        for group, known in zip(opt.param_groups, names, strict=True):
            group |= {} if known is None else {"param_names": known}
        raise
    finally:
        for group, tensors in zip(opt.param_groups, shown, strict=True):
            group["params"] = tensors


def _slices(zero: Any) -> Iterator[FlatSlice]:
    """The flat slices of ZeRO's partitions, by its own records; none of any other optimizer."""
    reader = _reader(zero)
    return iter(()) if reader is None else reader(zero)


def _reader(zero: Any) -> Callable[[Any], Iterator[FlatSlice]] | None:
    """What reads the records of this class of ZeRO's."""
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return _of_stages_1_and_2
    if hasattr(zero, "fp32_groups_flat_partition"):
        return _of_bf16_optimizer
    return _of_stage_3 if hasattr(zero, "fp32_partitioned_groups_flat") else None


def _of_stages_1_and_2(zero: Any) -> Iterator[FlatSlice]:
    for i, tensor in enumerate(zero.single_partition_of_fp32_groups):
        group, size = zero.real_dp_process_group[i], int(zero.partition_size[i])
        members = zero.round_robin_bit16_groups[i]
        if (offsets := getattr(zero, "round_robin_bit16_offsets", None)) is not None:
            begins = offsets[i]
        else:  # an older DeepSpeed leaves no room between parameters
            begins = [0, *itertools.accumulate(p.numel() for p in members)][:-1]
        for p, begin in zip(members, begins, strict=True):
            yield _section(zero, tensor, p, p.shape, begin, size, group)


def _of_bf16_optimizer(zero: Any) -> Iterator[FlatSlice]:
    """Stage 1 of bfloat16 with float32 gradients, and pipelines of bfloat16 without ZeRO."""
    for i, tensor in enumerate(zero.fp32_groups_flat_partition):
        begin = 0
        for p in zero.bf16_groups[i]:
            group = zero.real_dp_process_group[i]
            yield _section(zero, tensor, p, p.shape, begin, tensor.numel(), group)
            begin += p.numel()


def _of_stage_3(zero: Any) -> Iterator[FlatSlice]:
    groups = getattr(zero, "sub_group_process_groups", None)  # since DeepSpeed 0.19.3
    for i, tensor in enumerate(zero.fp32_partitioned_groups_flat):
        group = zero.dp_process_group if groups is None else groups[i]
        at = 0
        for p in zero.fp16_groups[i]:
            size = p.partition_numel()
            yield _section(zero, tensor, p, p.ds_shape, 0, size, group, at)
            at += size


def _section(
    zero: Any, tensor: Any, p: Any, shape: Any, begin: int, size: int, group: Any, at: int = 0
) -> FlatSlice:
    if (names := getattr(zero, "param_names", None)) is None:
        raise ValueError(
            f"DeepSpeed's {type(zero).__name__} keeps no names of parameters (param_names), which "
            "state follows: in stage 3 use DeepSpeed 0.18.4 or later"
        )
    return sharding.section(tensor, names[p], tuple(shape), begin, size, group, at)


def _groups(zero: Any, opt: LowbitOptimizer) -> list[list[Any]]:
    """The partitions in each of the optimizer's groups."""
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        return [list(group["params"]) for group in opt.param_groups]
    held: list[list[Any]] = [[] for _ in opt.param_groups]  # stage 3 empties the groups
    for i, tensor in enumerate(zero.fp32_partitioned_groups_flat):
        held[zero.sub_group_to_group_id[i]].append(tensor)
    return held


def _check_weights(opt: LowbitOptimizer) -> None:
    """Raises ValueError if a group says how weights of 16 bits are stored."""
    for group in opt.param_groups:
        options = [group, *(group.get("overrides") or {}).values()]
        for chosen in (each.get("param_format", "auto") for each in options):
            if chosen not in ("auto", "nearest", "float32"):
                raise ValueError(
                    f"lowbit does not support param_format={chosen!r} under DeepSpeed: ZeRO "
                    "keeps float32 weights of its own, and those are stepped. Leave "
                    "param_format out, or use FSDP2 (fully_shard), which keeps none"
                )


def _refused(engine: Any, zero: Any) -> str | None:
    """What of ZeRO is not supported, and what to use instead."""
    if getattr(zero, "swap_optimizer", False):
        return (
            "NVMe offload of optimizer state, which moves the float32 state of its own optimizers: "
            "offload to the CPU, or use no offload"
        )
    if getattr(zero, "zenflow", False) or type(zero).__name__.startswith("SuperOffload"):
        return "ZenFlow and SuperOffload, which step by optimizers of their own: turn them off"
    if getattr(zero, "backup_optimizer", None) is not None:
        return (
            "partial offload, which steps a part by an Adam of its own: set "
            "offload_optimizer.ratio to 1"
        )
    if getattr(zero, "elastic_checkpoint", False):
        return (
            "elastic checkpoints, which cut state like weights: set elastic_checkpoint to false, "
            "and change the number of ranks by lowbit.flat.get_state_dict"
        )
    universal = getattr(engine, "load_universal_checkpoint", None)
    if universal is not None and universal():
        return (
            "loading of Universal Checkpoints, which writes into flat float32 state: turn "
            "load_universal off, and load the folder by lowbit.load_optimizer after bind"
        )
    # Only the engine knows the next two in every stage.
    if getattr(engine, "has_moe_layers", False) or getattr(zero, "has_moe_layers", False):
        return (
            "mixture-of-experts layers, whose experts have the same names on different ranks: use "
            "FSDP2 (fully_shard) with expert parallelism"
        )
    if _tensor_parallel(getattr(engine, "mpu", None)) > 1:
        return (
            "tensor parallelism under ZeRO, whose parts have the same names on different ranks: "
            "use FSDP2 over DTensors"
        )
    return None


def _tensor_parallel(mpu: Any) -> int:
    """The ranks that share a tensor. A pipeline's stages, which an `mpu` may count as model
    parallel, have tensors of their own.
    """
    # The newest name first.
    for kind in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        if (ask := getattr(mpu, f"get_{kind}_world_size", None)) is not None:
            return int(ask())
    return 1
