"""The reductions of FSDP2, DDP and FSDP1, replaced by something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.sharding.collective import average_over
from lowbit.sharding.wrapper import param_groups


class UnitAddends:
    """What FSDP2 calls instead of a reduce-scatter: it exchanges addends and adds nothing.

    FSDP2 then runs the hooks of the unit's parameters in the order of their gradients. Each takes
    the rows of its own parameter.
    """

    def __init__(self, ranks: int, exchange: Callable[[Tensor, Any], Tensor]) -> None:
        self.ranks, self._exchange = ranks, exchange
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
        if self._rows is not None:
            raise RuntimeError(NOT_TAKEN)
        if self.idle:
            input_tensor.zero_()
        self._rows, self._used = self._exchange(input_tensor.view(self.ranks, -1), group), 0
        output_tensor.zero_()  # the hooks replace it

    @property
    def waiting(self) -> bool:
        """Whether rows arrived that no hook has taken."""
        return self._rows is not None

    def take(self, width: int, n: int) -> Tensor:
        """The first n columns of the next `width`: the addends of a parameter's local part,
        [ranks, n], or the words of each node.
        """
        assert self._rows is not None
        if self._rows.device.type != "cpu":  # under HSDP the stream of the hooks is another one
            stream: Any = torch.accelerator.current_stream(self._rows.device)
            self._rows.record_stream(stream)
        rows = self._rows[:, self._used : self._used + n]
        self._used += width
        if self._used == self._rows.shape[1]:
            self._rows = None
        return rows

    def clear(self) -> None:
        self._rows = None


class Unit:
    """One or several modules that `fully_shard` was called on together, whose addends are exchanged
    instead of reduced.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        groups = param_groups(module)
        name = type(module).__name__
        if len(groups) > 1:
            raise NotImplementedError(
                'rounding="exact" needs one mesh for all parameters of a module under fully_shard, '
                f"but this {name} has {len(groups)}; call fully_shard on a submodule for each mesh"
            )
        self.params: list[tuple[Any, int]] = []  # (sharded parameter, its padded size)
        self.groups: list[Any] = []  # replicas first
        self.addends: UnitAddends | None = None
        self.replicas: Any = None
        self._group: Any = None
        if not groups:
            return
        [self._group] = groups
        mesh = self._group.mesh_info
        shards = getattr(mesh, "shard_process_group", None)
        replicas = getattr(mesh, "replicate_process_group", None)
        self._ranks = 1 if shards is None else shards.size()
        if replicas is not None and replicas.size() > 1:
            if self._ranks == 1:
                raise NotImplementedError(
                    'rounding="exact" does not support a mesh of replicas alone under fully_shard: '
                    "torch adds their gradients before lowbit sees them. Use "
                    "DistributedDataParallel, or shard over at least 2 ranks"
                )
            self.replicas = replicas
        self.groups = [g for g in (replicas, shards) if g is not None and g.size() > 1]
        for param in self._group.fsdp_params:
            self.params.append((param.sharded_param, param.padded_sharded_param_size.numel()))
        self._trained = [p.requires_grad for p, _ in self.params]

    def begin(self, exchange: Callable[[Tensor, Any], Tensor]) -> None:
        """Replaces the reduction by `exchange(rows, group)`."""
        if not self.groups:
            return
        group = self._group
        self._before = (
            group._reduce_scatter_comm,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        self.addends = UnitAddends(self._ranks, exchange)
        self._set(self.addends, 1.0, True)

    def _set(self, comm: Any, factor: float | None, sums: bool) -> None:
        self._module.set_custom_reduce_scatter(comm)
        self._module.set_gradient_divide_factor(factor)
        self._module.set_force_sum_reduction_for_comms(sums)

    def check(self) -> None:
        """Raises RuntimeError where hooks would not run, or would take another parameter's rows."""
        if self.addends is None:
            return
        if not (self._group.reduce_grads and self._group.all_reduce_grads):
            raise RuntimeError(
                'rounding="exact" reduces in every backward pass: leave out '
                "set_requires_gradient_sync(False) and set_requires_all_reduce(False)"
            )
        now = [param.sharded_param for param in self._group.fsdp_params]
        same = len(now) == len(self.params) and all(
            a is b and a.requires_grad == trained
            for a, (b, _), trained in zip(now, self.params, self._trained, strict=True)
        )
        if not same:
            raise RuntimeError(
                "the parameters of a module under fully_shard were replaced, frozen or unfrozen "
                "since lowbit.accumulate was called on it; remove() the accumulator and make "
                "another one"
            )

    def remove(self) -> None:
        """Restores torch's own reduction."""
        if self.addends is not None:
            self._set(*self._before)
            self.addends = None


NOT_TAKEN = (
    "gradients were exchanged that reached no hook of lowbit.accumulate; was a parameter frozen or "
    "replaced since it was called, or set_requires_all_reduce(False) set?"
)


def units(model: nn.Module) -> list[Unit]:
    """The modules of a model that `fully_shard` was called on; those that it was called on together
    are one.
    """
    found: dict[int, Any] = {}
    module: Any
    for module in model.modules():
        # Its own: wrappers such as PEFT's have the attributes of the module inside.
        if hasattr(type(module), "set_custom_reduce_scatter"):
            found.setdefault(id(module._get_fsdp_state()), module)
    return [Unit(module) for module in found.values()]


def fsdp1_modules(model: nn.Module) -> list[Any]:
    """The modules that FullyShardedDataParallel (FSDP1) wraps and that have parameters of their
    own.
    """
    return [m for m in _fsdp1(model) if getattr(m, "_handle", None) is not None]


def _fsdp1(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "register_comm_hook") and "_handle" in vars(m)]


def done(t: Tensor) -> torch.futures.Future[Tensor]:
    """A future that has its value, for the stream that is current."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[t.device] if t.is_cuda else None
    )
    future.set_result(t)
    return future


BucketHook = Callable[[Any], Tensor]


def hook_buckets(model: Any, hook: BucketHook) -> Callable[[], None]:
    """Calls `hook` with each bucket of a DistributedDataParallel instead of its all-reduce.

    The hook returns the bucket's flat gradient. torch cannot unregister a communication hook; once
    it is removed, buckets are averaged as without one.

    Returns:
        What removes the hook.

    Raises:
        RuntimeError: the model has a communication hook already.
    """
    current = getattr(model, "_lowbit_bucket_hook", None)
    if current is None:
        current = [None]
        group = model.process_group  # not the model, whose reducer keeps the hook

        # torch reads annotations, and none is text
        def call(_, bucket):  # type: ignore[no-untyped-def]
            flat = bucket.buffer()
            if current[0] is None:
                average_over(flat, group)
                return done(flat)
            return done(current[0](bucket))

        try:
            model.register_comm_hook(None, call)
        except RuntimeError as error:  # torch: it "can only be called once"
            raise RuntimeError(
                'rounding="exact" needs the communication hook of DistributedDataParallel for '
                "itself, and this module has one already: leave out register_comm_hook, or wrap "
                "the module again without it"
            ) from error
        model._lowbit_bucket_hook = current
    current[0] = hook

    def remove() -> None:
        current[0] = None

    return remove


class FlatUnit:
    """A module of FSDP1 with parameters of its own. torch hands it to the hook as its state."""

    def __init__(self, module: Any) -> None:
        # The hook's state, where the module itself would become its own submodule.
        self.module, self._handle, self.group = module, module._handle, module.process_group
        self.name = ", ".join(self._handle.flat_param._fqns[:3])

    @property
    def params(self) -> list[Any]:
        """The flat parameter, and the original ones that are views of it."""
        flat = self._handle.flat_param
        return [flat, *(flat._params or ())]


def flat_units(model: nn.Module) -> list[FlatUnit]:
    """The units of FSDP1 in a model; none without it."""
    return [FlatUnit(module) for module in fsdp1_modules(model)]


FlatHook = Callable[[FlatUnit, Tensor, Tensor], None]


def hook_flat_gradients(model: nn.Module, units: Sequence[FlatUnit], hook: FlatHook) -> None:
    """Calls `hook(unit, gradient, shard)` instead of FSDP1's reduce-scatter, for each of the
    model's units.

    Without sharding (one rank, or NO_SHARD) the gradient is the shard. torch cannot unregister the
    hook.

    Raises:
        AssertionError: the model has a communication hook already.
        NotImplementedError: a hybrid sharding strategy, or a reduction in another dtype than the
            parameters'.
    """
    for unit in units:
        strategy = unit.module.sharding_strategy.name
        if "HYBRID" in strategy:
            raise NotImplementedError(
                f'rounding="exact" does not support sharding_strategy={strategy} of FSDP1, where '
                "torch allows no communication hook; use fully_shard (FSDP2) on a mesh of two "
                "dimensions"
            )
        handle = unit.module._handle
        if handle._reduce_dtype != handle._orig_param_dtype:
            raise NotImplementedError(
                f"FSDP1 reduces in {handle._reduce_dtype} and then converts to "
                f"{handle._orig_param_dtype}, which would round twice; set "
                f'reduce_dtype={handle._orig_param_dtype} in MixedPrecision for rounding="exact"'
            )

    def call(unit: FlatUnit, gradient: Tensor, shard: Tensor | None = None) -> None:
        hook(unit, gradient, gradient if shard is None else shard)

    inner = {id(below) for top in _fsdp1(model) for below in _fsdp1(top) if below is not top}
    for top in _fsdp1(model):
        if id(top) not in inner:
            top.register_comm_hook(None, call)
    for unit in units:
        unit.module._comm_hook_state = unit  # torch gives all of them the root's
