"""The reductions of FSDP2, DDP and FSDP1, with something else in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.sharding.addends import exchange_rows


class UnitAddends:
    """What FSDP2 calls in the place of a reduce-scatter: it exchanges addends and adds nothing.

    FSDP2 then runs the hooks of the unit's parameters in the order of their gradients. Each takes
    the rows of its own parameter.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.idle = False  # whether this rank's gradients count as zeros
        self._rows: Tensor | None = None
        self._used = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self.idle:
            input_tensor.zero_()
        self._rows, self._used = exchange_rows(input_tensor.view(self.ranks, -1), group), 0
        output_tensor.zero_()  # the hooks replace it

    def take(self, width: int, n: int) -> Tensor:
        """The first n columns of the next `width`: the addends of a parameter's local part,
        [ranks, n].
        """
        assert self._rows is not None
        rows = self._rows[:, self._used : self._used + n]
        self._used += width
        if self._used == self._rows.shape[1]:
            self._rows = None
        return rows


class Unit:
    """A module that `fully_shard` was called on, with the addends in the place of its reduction."""

    def __init__(self, module: Any) -> None:
        self._module = module
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.12 and earlier
            groups = [g for g in [state._fsdp_param_group] if g is not None]
        if len(groups) > 1:
            raise NotImplementedError(
                'rounding="exact" needs one mesh for all parameters of a '
                "module under fully_shard, but this "
                f"{type(module).__name__} has {len(groups)}; call fully_shard "
                "on a submodule for each mesh"
            )
        self.params: list[tuple[Any, int]] = []  # (sharded parameter, its padded size)
        self.groups: list[Any] = []  # replicas first
        self.addends: UnitAddends | None = None
        if not groups:
            return
        [group] = groups
        shards = getattr(group.mesh_info, "shard_process_group", None)
        replicas = getattr(group.mesh_info, "replicate_process_group", None)
        ranks = 1 if shards is None else shards.size()
        if replicas is not None and replicas.size() > 1 and ranks == 1:
            raise NotImplementedError(
                'rounding="exact" does not support a mesh of replicas alone under fully_shard: '
                "torch adds their "
                "gradients before lowbit sees them. Use DistributedDataParallel, or shard over at "
                "least 2 ranks"
            )
        self.groups = [g for g in (replicas, shards) if g is not None and g.size() > 1]
        self.replicas = replicas if replicas is not None and replicas.size() > 1 else None
        for param in group.fsdp_params:
            self.params.append((param.sharded_param, param.padded_sharded_param_size.numel()))
        self._before = (
            group._reduce_scatter_comm,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        if ranks > 1:
            self.addends = UnitAddends(ranks)
            self._set(self.addends, 1.0, True)

    def _set(self, comm: Any, factor: float | None, sums: bool) -> None:
        self._module.set_custom_reduce_scatter(comm)
        self._module.set_gradient_divide_factor(factor)
        self._module.set_force_sum_reduction_for_comms(sums)

    def remove(self) -> None:
        """Restores torch's own reduction."""
        if self.addends is not None:
            self._set(*self._before)


def units(model: nn.Module) -> list[Unit]:
    """The modules of a model that `fully_shard` was called on."""
    return [Unit(m) for m in model.modules() if hasattr(m, "set_custom_reduce_scatter")]


def fsdp1_modules(model: nn.Module) -> list[Any]:
    """The modules that FullyShardedDataParallel (FSDP1) wraps and that have parameters of their
    own.
    """
    return [
        m
        for m in model.modules()
        if hasattr(m, "register_comm_hook") and getattr(m, "_handle", None) is not None
    ]


def done(t: Tensor) -> torch.futures.Future[Tensor]:
    """A future that has its value, for the stream that is current."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[t.device] if t.is_cuda else None
    )
    future.set_result(t)
    return future


BucketHook = Callable[[Any], Tensor]


def hook_buckets(model: Any, hook: BucketHook) -> Callable[[], None]:
    """Calls `hook` with each bucket of a DistributedDataParallel in the place of its all-reduce.

    The hook returns the bucket's flat gradient. torch cannot unregister a communication hook; once
    it is removed, buckets are averaged as without one.

    Returns:
        What removes the hook.

    Raises:
        RuntimeError: the model has a communication hook already.
    """
    import torch.distributed as dist

    current = getattr(model, "_lowbit_bucket_hook", None)
    if current is None:
        current = [None]

        # torch reads annotations, and none is text
        def call(_, bucket):  # type: ignore[no-untyped-def]
            flat = bucket.buffer()
            if current[0] is None:
                flat.div_(model.process_group.size())
                dist.all_reduce(flat, group=model.process_group)
                return done(flat)
            return done(current[0](bucket))

        model.register_comm_hook(None, call)
        model._lowbit_bucket_hook = current
    current[0] = hook

    def remove() -> None:
        current[0] = None

    return remove


FlatHook = Callable[[Any, Tensor, Tensor], None]


def hook_flat_gradients(model: nn.Module, hook: FlatHook) -> list[Any]:
    """Calls `hook(key, gradient, shard)` in the place of FSDP1's reduce-scatter;
    the key is one of those returned.

    Without sharding (one rank, or NO_SHARD) the gradient is the shard.
    torch cannot unregister the hook.

    Raises:
        RuntimeError: the model has a communication hook already.
        NotImplementedError: a hybrid sharding strategy,
            or a reduction in another dtype than the parameters'.
    """
    modules = fsdp1_modules(model)
    for module in modules:
        strategy = module.sharding_strategy.name
        if "HYBRID" in strategy:
            raise NotImplementedError(
                f'rounding="exact" does not support sharding_strategy={strategy} of FSDP1, where '
                "torch allows no "
                "communication hook; use fully_shard (FSDP2) on a mesh of two dimensions"
            )
        handle = module._handle
        if handle._reduce_dtype != handle._orig_param_dtype:
            raise NotImplementedError(
                f"FSDP1 reduces in {handle._reduce_dtype} and then converts to "
                f"{handle._orig_param_dtype}, which would round "
                f"twice; set reduce_dtype={handle._orig_param_dtype} in MixedPrecision for "
                'rounding="exact"'
            )

    def call(key: Any, gradient: Tensor, shard: Tensor | None = None) -> None:
        hook(key, gradient, gradient if shard is None else shard)

    modules[0].register_comm_hook(modules[0], call)
    for module in modules:
        module._comm_hook_state = module  # torch gives all of them the root's
    return modules
