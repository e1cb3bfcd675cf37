"""Conversion of one parameter's saved state, from any known layout, to this optimizer's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import sharding
from lowbit.config.hints import outside
from lowbit.state import memory
from lowbit.state.layout import Layout
from lowbit.state.lazy_tensor import LazyTensor
from lowbit.state.moment import is_own_key
from lowbit.state.quantize import dequantize_slot, quantize_slot
from lowbit.state.saved import (
    SavedTensor,
    check_rule,
    find_saved,
    find_source,
    in_other_blocks,
    of_other_programs,
    same_memory,
    unknown,
    with_known_names,
)
from lowbit.state.settings import some
from lowbit.state.slot import Slot, StateTensor

# Values that are dequantized and quantized at a time, where state comes from a checkpoint.
PIECE = 4 << 20

# Makes a parameter's state from the optimizer's: in place where its tensors fit, else in new ones.
Converted = Callable[[Mapping[str, Tensor], bool], dict[str, Tensor]]


def convert_state(
    p: Tensor,
    lay: Layout,
    saved: Mapping[str, Any],
    key: Any,
    state_memory: str = "device",
    shared: sharding.SharedFailure | None = None,
) -> Converted:
    """How this optimizer's state of parameter p is made from saved state: moved where it fits,
    converted where it does not.

    Everything is checked here and nothing is read yet, so that a state dict that does not fit
    changes nothing. Tensors that lie in a checkpoint (`LazyTensor`) are read by the rows that are
    here, in pieces.

    Args:
        p: the parameter.
        lay: its layout in this optimizer.
        saved: its saved state.
        key: the state dict's name for p, for errors.
        state_memory: where new tensors are allocated; one of `memory.MEMORIES`,
            "device" by default.
        shared: takes what fails while values are read.

    Returns:
        A function from the live state, and whether it may be written to, to the converted state. It
        writes to live tensors that fit. After a failure that `shared` has, the state lacks values.

    Raises:
        ValueError: a moment or an entry of a flattened state dict is missing, or the layout of a
            moment is unknown.
    """
    _check_flattened(saved, key)
    saved = with_known_names(lay, saved, key)
    step = saved.get("step", None)
    if step is None:
        raise unknown(saved, key, "it has no 'step'")
    step, stream = _number(step), _number(saved.get("stream", lay.stream))
    jobs = _jobs(p, lay, saved, key)
    check_rule(lay, saved, key)
    device = sharding.local(p).device
    others = of_other_programs(saved)

    def tensor_for(entry: StateTensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        """The destination of an entry, as it is kept and its local shard: the live tensor where it
        fits, else a new one.
        """
        here = None if known is None else sharding.local(known)
        if here is None or here.dtype != entry.dtype or tuple(here.shape) != entry.local:
            here = memory.empty(lay, entry, device, state_memory)
            known = sharding.like(lay.placed(p, entry), here, entry.shape, entry.follows)
        assert known is not None
        return known, here

    def run(live: Mapping[str, Tensor], in_place: bool) -> dict[str, Tensor]:
        attempt = _call if shared is None else shared.attempt
        state: dict[str, Tensor] = {}

        def begin() -> None:
            if lay.compensation and jobs[-1].fill is _zero:
                _warn_of_cleared(live.get(lay.compensation.key))
            # copies, because torch shares its tensors: two optimizers would count one step twice
            where = device if device.type == "cuda" else "cpu"
            state["step"] = torch.tensor(step, dtype=torch.float32, device=where)
            state.update(lay.identity(int(stream)))

        def prepare(job: _Job) -> list[Any]:
            tensors = []
            for entry in job.entries:
                known = live.get(entry.key) if in_place else None
                state[entry.key], here = tensor_for(entry, known)
                tensors.append(here)
            given = [] if job.read is None else [job.read().to(tensors[0].device)]
            return [*given, tensors]

        def end() -> None:
            for key, value in others.items():  # copies too
                if isinstance(value, Tensor):
                    value = value.to(device, copy=True) if value.ndim else value.clone()
                state.setdefault(key, value)

        attempt(begin)
        for job in jobs:
            given = attempt(prepare, job)
            if shared is not None:
                shared.exchange(job.groups)
            attempt(lambda job=job, given=given: job.fill(*given))
        attempt(end)
        return state

    return run


def _check_flattened(saved: Mapping[str, Any], key: Any) -> None:
    """ValueError for entries that a flattened state dict lacks: torch makes empty dicts of them."""
    absent = [name for name, value in saved.items() if isinstance(value, Mapping) and not value]
    if "step" in absent:
        raise ValueError(
            f"the state dict has no {some(absent)} entries for state[{key!r}], as for a layer that "
            "was added or renamed since. Load it into the model that it was saved from, or add "
            "entries for this parameter: those that get_optimizer_state_dict returns "
            "for a new optimizer are fresh state"
        )
    lacking = [name for name in absent if is_own_key(name)]
    if lacking:
        raise ValueError(
            f"the state dict has no {some(lacking)} for state[{key!r}]: it seems to be of another "
            "state_format, and torch takes from a flattened state dict only the entries that this "
            "optimizer has. Save it to a file, and call lowbit.load_optimizer(opt, path, "
            "model=model), which converts it"
        )


class _Job(NamedTuple):
    """Some tensors of a parameter's state, and what fills the parts of them that are here: from
    what `read` returns, if it is given.

    A `fill` with collectives has the process groups of the ranks that it waits for.
    """

    entries: Sequence[StateTensor]
    fill: Callable[..., None]
    read: Callable[[], Tensor] | None = None
    groups: Sequence[Any] = ()


def _call(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


def _jobs(p: Tensor, lay: Layout, saved: Mapping[str, Any], key: Any) -> list[_Job]:
    """Those of all of a parameter's state; that of the weight's compensation is the last one."""
    at = lay.home.placed if lay.home else p
    jobs = [_slot_job(at, lay, slot, saved, key) for slot in lay.slots]
    jobs += [_auxiliary_job(at, entry, saved, key) for entry in lay.auxiliary]
    if lay.compensation:
        jobs.append(_compensation_job(p, lay.compensation, saved, key))
    return jobs


def _slot_job(p: Tensor, lay: Layout, slot: Slot, saved: Mapping[str, Any], key: Any) -> _Job:
    """A moment: moved where it is kept in this very format,
    else converted from the format it is kept in.
    """
    entries = slot.entries(lay.part)
    if not in_other_blocks(lay, slot, saved):
        kept = find_saved(p, entries, saved, key, cast=slot.name)
        if kept is not None:
            return _Job(entries, partial(_move, kept))
    whole = replace(lay, part=_whole_rows(lay.part))  # blocks are not cut there
    source, values = find_source(p, whole, slot, saved, key)
    if slot.cross_tile or source.cross_tile:
        groups = [group for _, group in whole.part.cuts] if slot.cross_tile else []
        read = partial(_all_values, whole, source, values)
        return _Job(entries, partial(_quantize_all, whole, slot, entries), read, groups)
    return _Job(entries, partial(_recode, whole, slot, source, values, entries))


def _auxiliary_job(p: Tensor, entry: StateTensor, saved: Mapping[str, Any], key: Any) -> _Job:
    """Means and numbers beside the moments. A norm that torch does not keep is 0,
    as a first step finds it.
    """
    kept = find_saved(p, [entry], saved, key, cast=entry.key)
    if kept is None and entry.shape:
        raise unknown(saved, key, f"it has no {entry.key}")
    return _Job([entry], _zero if kept is None else partial(_move, kept))


def _compensation_job(p: Tensor, entry: StateTensor, saved: Mapping[str, Any], key: Any) -> _Job:
    """The compensation of the weight, 0 if the parameter had none before."""
    kept = find_saved(p, [entry], saved, key)
    other = next((str(k) for k in saved if str(k).startswith("param_")), None)
    if kept is None and other is not None:
        raise ValueError(
            f"state[{key!r}] keeps {other!r} beside the weight, this optimizer {entry.key!r}: load "
            "it with the format it was saved with, and take lowbit.get_fp32_model_state_dict from "
            "there to another format"
        )
    return _Job([entry], _zero if kept is None else partial(_move, kept))


def _warn_of_cleared(kept: Tensor | None) -> None:
    """Of the optimizer's own compensation, where it is not 0: it may be what
    `set_fp32_model_state_dict` has just stored.
    """
    here = None if kept is None else sharding.local(kept)
    if here is not None and not here.is_meta and here.any():
        warnings.warn(
            "the state that is loaded has no correction bits for the weights, so those of the "
            "optimizer are cleared. If they are those of lowbit.set_fp32_model_state_dict, load "
            "the optimizer first and store the float32 weights after it",
            stacklevel=outside(),
        )


def holds(saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether saved state contains the live tensors: `state_dict()` returned them,
    and a load wrote to them.
    """
    tensors = {key: t for key, t in live.items() if isinstance(t, Tensor) and t.ndim}
    return bool(tensors) and all(same_memory(saved.get(key), t) for key, t in tensors.items())


def _number(value: Any) -> float:
    if isinstance(value, LazyTensor):
        value = value.tensor()
    if isinstance(value, Tensor):
        value = sharding.local(value).detach().reshape(()).item()
    return float(value) if not isinstance(value, int) else value


def _zero(to: Sequence[Tensor]) -> None:
    for tensor in to:
        tensor.zero_()


def _row_runs(
    values: Sequence[SavedTensor], entries: Sequence[Tensor]
) -> Iterator[tuple[int, int]]:
    """Ranges of rows to process together: all rows,
    or chunks of them if values lie in a checkpoint.
    """
    first = entries[0]
    if first.ndim == 0 or not any(isinstance(kept.value, LazyTensor) for kept in values):
        yield 0, first.shape[0] if first.ndim else 1
        return
    rows = max(1, PIECE // max(1, first[:1].numel()))
    for begin in range(0, first.shape[0], rows):
        yield begin, min(begin + rows, first.shape[0])


def _move(values: Sequence[SavedTensor], to: Sequence[Tensor]) -> None:
    """Copies tensors of the same format."""
    for kept, tensor in zip(values, to, strict=True):
        for begin, end in _row_runs([kept], [tensor]):
            target = tensor[begin:end] if tensor.ndim else tensor
            target.copy_(kept.rows(begin, end))


def _recode(
    lay: Layout,
    slot: Slot,
    source: Slot,
    values: Sequence[SavedTensor],
    entries: Sequence[StateTensor],
    to: Sequence[Tensor],
) -> None:
    """Fills tensors of `slot` from those of `source`, by chunks of rows: no scale covers more
    than a row.

    Args:
        lay: the layout of the values, with whole rows.
        slot, source: the new and the saved format.
        values: the saved tensors.
        entries: the local parts of `slot`'s tensors.
        to: the tensors to fill.
    """
    for begin, end in _row_runs(values, to):
        run = replace(lay, part=lay.part.take_rows(begin, end))
        read = [kept.rows(begin, end).to(to[0].device) for kept in values]
        dequantized = (
            dequantize_slot(read, run, source) if source.coded else read[0].to(torch.float32)
        )
        for entry, tensor, made in zip(
            entries, to, quantize_slot(dequantized, run, slot), strict=True
        ):
            target = tensor[begin:end] if tensor.ndim else tensor
            target.copy_(_of(entry, made).reshape(target.shape))


def _all_values(lay: Layout, source: Slot, values: Sequence[SavedTensor]) -> Tensor:
    """All local values at once, where a scale covers more than a row."""
    whole = [kept.all() for kept in values]
    return dequantize_slot(whole, lay, source) if source.coded else whole[0].to(torch.float32)


def _quantize_all(
    lay: Layout,
    slot: Slot,
    entries: Sequence[StateTensor],
    values: Tensor,
    to: Sequence[Tensor],
) -> None:
    """Fills tensors of `slot` from all local values; a collective where ranks share a scale."""
    coded = quantize_slot(values, lay, slot)
    for entry, tensor, made in zip(entries, to, coded, strict=True):
        tensor.copy_(_of(entry, made).reshape(tensor.shape))


def _of(entry: StateTensor, made: Tensor) -> Tensor:
    """An entry's columns of a tensor that may have all columns."""
    for dim, follows in enumerate(entry.dims):
        if follows != 0 and made.shape[dim] != entry.local[dim]:
            made = made.narrow(dim, entry.offset[dim], entry.local[dim])
    return made


def _whole_rows(part: sharding.Part) -> sharding.Part:
    """The local rows with all of their columns, if blocks are split between columns, or columns
    here are not a run of a row.
    """
    if part.cut != sharding.CUT_ALL and part.deep is None:
        return part
    return replace(
        part,
        local=(part.local[0], *part.shape[1:]),
        offset=(part.offset[0], *(0,) * (len(part.shape) - 1)),
        cuts=tuple((dim, group) for dim, group in part.cuts if dim == 0),
        follows=(0, *(-1,) * (len(part.shape) - 1)),
        begins=(),
        cut=sharding.CUT_NONE,
    )
