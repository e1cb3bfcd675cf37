"""Whether any rank has a gradient of each sharded parameter,
agreed on before collectives that depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.step.numbers import capturing

# What a rank sends about a parameter: 0 without a gradient, else 1 + the index of its dtype here.
# Ranks that give zeros give this dtype, since what travels home is counted in bytes.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Presence:
    """The sharded parameters of every mesh over which any step reduces or that cuts experts, and
    this rank's gradients when last asked.

    A sharded parameter is one tensor: if one rank has a gradient of its part, the other parts'
    gradients are zero. A rank that skipped it would reduce numbers of different parameters
    together, or make ranks wait for each other. Without a reduction only some ranks would count the
    step, while a checkpoint keeps one count. So ranks agree on experts under every rule. FSDP2
    gives all ranks the gradients of its own parameters, so they need not agree on matrices and
    vectors.
    """

    def __init__(
        self,
        params: Sequence[Any],
        laid_out: Iterable[tuple[Any, Any, Layout]],
        name_of: Mapping[Any, str | None],
    ) -> None:
        """
        Args:
            params: all parameters of the optimizer, to compare with.
            laid_out: (group, parameter, layout) of each.
            name_of: their names, by which ranks see whether they have them in the same order.
        """
        self._params = list(params)
        self._name_of = name_of
        together: dict[tuple[Any, ...], list[Any]] = {}
        reduced = set()
        for _, p, lay in laid_out:
            groups = _groups(p, lay)
            if groups:
                together.setdefault(groups, []).append(p)
                if _reduces(lay) or _is_batch(lay):
                    reduced.add(groups)
        # Parameters on the same mesh that reduce nothing are asked about too; that costs nothing.
        together = {groups: found for groups, found in together.items() if groups in reduced}
        self._together = list(together.items())
        self._mine: list[Tensor] = []
        self._compared = False

    def of(self, params: Sequence[Any]) -> bool:
        """Whether these are still the optimizer's parameters."""
        return len(params) == len(self._params) and all(
            p is q for p, q in zip(params, self._params, strict=True)
        )

    def lacking(self, same: bool, stepped: Collection[Any] = ()) -> list[tuple[Any, torch.dtype]]:
        """The parameters without a gradient here of which another rank has one, or had one in the
        backward pass, and its dtype.

        It takes one collective for each process group,
        or none if no step reduces and no batch of matrices is cut.

        Args:
            same: whether this rank has gradients of the same parameters as when it last asked.
            stepped: the parameters that this rank has stepped in the backward pass already.
        """
        # replays have the gradients of earlier steps, which asked
        if not self._together or capturing():
            return []
        if not self._compared:
            self._compare()
        if not same or not self._mine or stepped:
            self._mine = [
                torch.tensor(
                    [_told(p, stepped) for p in params],
                    dtype=torch.int32,
                    device=sharding.host_device(groups, sharding.local(params[0]).device),
                )
                for groups, params in self._together
            ]
        anyone = [mine.clone() for mine in self._mine]
        sharding.reduce_over(
            [
                (flags, group, "max")
                for flags, (groups, _) in zip(anyone, self._together, strict=True)
                for group in groups
            ]
        )
        found = [
            (p, _DTYPES[there - 1])
            for (_, params), mine, flags in zip(self._together, self._mine, anyone, strict=True)
            if not torch.equal(mine, flags)
            for p, here, there in zip(params, mine.tolist(), flags.tolist(), strict=True)
            if there and not here
        ]
        if found or stepped:
            # a repeated step has gradients where this one lacked them, which were given zeros
            self._mine = []
        return found

    def _compare(self) -> None:
        """Raises ValueError where ranks have other parameters, or the same in another order."""
        for groups, params in self._together:
            listed = [(self._name_of[p], tuple(p.shape)) for p in params]
            for group in groups:
                device = sharding.local(params[0]).device
                if difference := sharding.disagreement(listed, group, device):
                    raise ValueError(
                        "ranks of one process group give this optimizer different parameters, or "
                        f"the same in another order: the group's parameter {difference}. Build the "
                        "optimizer from the same list on every rank; a set has another order in "
                        "each process, so sort it"
                    )
        self._compared = True


def give_zeros(lacking: Iterable[tuple[Any, torch.dtype]]) -> None:
    """Gives the parameters that `Presence.lacking` found gradients of zeros."""
    for p, dtype in lacking:
        if getattr(p, "grad_dtype", None) not in (None, dtype):
            p.grad_dtype = None  # as on the ranks that have a gradient of another dtype
        p.grad = torch.zeros_like(p, dtype=dtype)


def _told(p: Any, stepped: Collection[Any]) -> int:
    if p.grad is None and p not in stepped:
        return 0
    return 1 + _DTYPES.index(p.dtype if p.grad is None else p.grad.dtype)


def is_cut_batch(p: Any, lay: Layout) -> bool:
    """Whether a parameter is a sharded batch of matrices, such as experts,
    of which some ranks may lack the gradient.
    """
    return bool(_groups(p, lay)) and (_is_batch(lay) or lay.home is not None)


def waits_for_others(p: Any, lay: Layout) -> bool:
    """Whether such a batch's step also reduces over the ranks, which have to agree first."""
    return is_cut_batch(p, lay) and _reduces(lay)


def _groups(p: Any, lay: Layout) -> tuple[Any, ...]:
    """The process groups whose ranks have other parts of a parameter; of flat shards none, for
    which FlatShardReducer asks.
    """
    return () if isinstance(p, sharding.FlatShard) else lay.cut_groups


def _is_batch(lay: Layout) -> bool:
    """Whether a parameter is a batch of matrices, as experts are: [E, H, D]. Conv1d's [out, in,
    kernel] is not one: kernels are short.
    """
    return len(lay.shape) == 3 and lay.shape[2] >= ops.policy("thresholds")["min_cols"]


def _reduces(lay: Layout) -> bool:
    """Whether the step of a sharded parameter reduces anything over the ranks."""
    if lay.exchanges:
        return True
    dims = {dim for dim, _ in lay.part.cuts}
    scales = {slot.scale for slot in lay.slots if slot.cross_tile}
    rows = bool(lay.part.cut != sharding.CUT_NONE or scales & {"row", "rank1"}) and max(dims) > 0
    cols = bool(scales & {"column", "rank1"}) and 0 in dims
    return bool(lay.rounds or "tensor" in scales or rows or cols)
