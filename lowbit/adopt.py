"""One parameter's loaded state, in whatever known layout, as this optimizer keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit import memory, ops, shard
from lowbit.coding import decode_slot, encode_slot
from lowbit.layout import Entry, Layout, Slot
from lowbit.stored import Stored

# What a foreign state dict is recognised by, and what it is.
PEERS = {
    "__bnb_optimizer_quant_state__": "bitsandbytes",
    "qmap1": "bitsandbytes",
    "absmax1": "bitsandbytes",
    "row_var_q": "adafactor-8bit",
    "variance_q": "adafactor-8bit",
    "qconfig": "lpmm",
    "ema_squared": "torchastic",
    "momentum_buffer": "an SGD with momentum",
    "row_var": "torch Adafactor",
}


PIECE = (
    4 << 20
)  # values that are decoded and encoded at a time, where state comes from a checkpoint

# Fills the tensors of a parameter's state: those of the live state that it is given, where they fit, else new ones.
Adoption = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def adopt_state(
    p: Tensor, lay: Layout, saved: Mapping[str, Any], key: Any, state_memory: str = "device"
) -> Adoption:
    """How this optimizer's state of parameter p is made from saved state: moved where it fits, decoded and encoded where it does not.

    Everything is checked here and nothing is read yet, so that a state dict that does not fit changes nothing. Tensors that lie in a checkpoint
    (`Stored`) are read by the rows that are here, in pieces.

    Args:
        key: the state dict's name for p, for errors.
        state_memory: of tensors that must be made.

    Raises:
        ValueError: a moment is missing, or its layout is unknown.
    """
    device = shard.local(p).device
    saved = _known_names(p, lay, saved)
    step = saved.get("step", None)
    if step is None:
        raise _unknown(saved, key, "it has no 'step'")
    step, stream = _number(step), _number(saved.get("stream", lay.stream))
    jobs: list[tuple[list[Entry], Callable[[Sequence[Tensor]], None]]] = []
    for slot in lay.slots:
        entries = slot.entries(lay.part)
        kept = _as_kept(p, entries, saved, key, cast=slot.name)
        if kept is None:
            whole = replace(lay, part=_whole_rows(lay.part))  # blocks are not cut there
            source = _source(p, whole, slot, saved, key)
            jobs.append((entries, partial(_recode, whole, slot, *source, entries)))
        else:
            jobs.append((entries, partial(_move, kept)))
    for entry in lay.others:
        kept = _as_kept(p, [entry], saved, key, cast=entry.key)
        if kept is None and entry.shape:
            raise _unknown(saved, key, f"it has no {entry.key}")
        # a norm that torch does not keep: what a first step finds
        jobs.append(([entry], _zero if kept is None else partial(_move, kept)))
    if lay.extra:  # absent where the parameter was plain before: then nothing is known beside it
        kept = _as_kept(p, [lay.extra], saved, key)
        other = next((str(k) for k in saved if str(k).startswith("param_")), None)
        if kept is None and other is not None:
            raise ValueError(
                f"state[{key!r}] keeps {other!r} beside the weight, this optimizer {lay.extra.key!r}: load it with the format it was saved with, and take "
                "lowbit.get_fp32_model_state_dict from there to another format"
            )
        jobs.append(([lay.extra], _zero if kept is None else partial(_move, kept)))
    number_device = device if device.type == "cuda" else "cpu"

    def run(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {
            # copies: torch hands out references, and two optimizers would count one step twice
            "step": torch.tensor(step, dtype=torch.float32, device=number_device),
            **lay.told(int(stream)),
        }
        for entries, fill in jobs:
            tensors = []
            for e in entries:
                known = live.get(e.key)
                here = None if known is None else shard.local(known)
                if here is None or here.dtype != e.dtype or tuple(here.shape) != e.local:
                    here = memory.empty(lay, e, device, state_memory)
                    known = shard.like(p, here, e.shape, e.follows)
                assert known is not None
                state[e.key] = known
                tensors.append(here)
            fill(tensors)
        return state

    return run


def is_stored(saved: Mapping[str, Any]) -> bool:
    """Whether saved state lies in a checkpoint that is read while it is adopted."""
    return any(isinstance(value, Stored) for value in saved.values())


def holds(saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether all tensors of a parameter's state are in saved state themselves: `state_dict()` handed them out, and they were loaded into."""
    tensors = {k: shard.local(t) for k, t in live.items() if isinstance(t, Tensor) and t.ndim}
    same = (
        isinstance(value := saved.get(key), Tensor)
        and (found := shard.local(value)).data_ptr() == tensor.data_ptr()
        and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        for key, tensor in tensors.items()
    )
    return bool(tensors) and all(same)


def _number(value: Any) -> float:
    if isinstance(value, Stored):
        value = value.tensor()
    if isinstance(value, Tensor):
        value = shard.local(value).detach().reshape(()).item()
    return float(value) if not isinstance(value, int) else value


def _zero(to: Sequence[Tensor]) -> None:
    for tensor in to:
        tensor.zero_()


def _pieces(values: Sequence[Kept], entries: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Runs of rows that are worked on together: all of them, but where values lie in a checkpoint."""
    first = entries[0]
    if first.ndim == 0 or not any(isinstance(kept.value, Stored) for kept in values):
        yield 0, first.shape[0] if first.ndim else 1
        return
    rows = max(1, PIECE // max(1, first[:1].numel()))
    for begin in range(0, first.shape[0], rows):
        yield begin, min(begin + rows, first.shape[0])


def _move(values: Sequence[Kept], to: Sequence[Tensor]) -> None:
    """The very tensors."""
    for kept, tensor in zip(values, to, strict=True):
        for begin, end in _pieces([kept], [tensor]):
            target = tensor[begin:end] if tensor.ndim else tensor
            target.copy_(kept.rows(begin, end))


def _recode(
    lay: Layout, slot: Slot, source: Slot, values: Sequence[Kept], entries: Sequence[Entry], to: Sequence[Tensor]
) -> None:  # fmt: skip
    """Tensors of `slot`, the parts of them in `entries`, from the tensors of `source`: by rows where scales do not cover more than a row."""
    if slot.measured or source.measured:
        whole = [kept.rows(0, lay.part.rows) for kept in values]
        decoded = decode_slot(whole, lay, source) if source.coded else whole[0].to(torch.float32)
        coded = encode_slot(decoded.to(to[0].device), lay, slot)
        for entry, tensor, made in zip(entries, to, coded, strict=True):
            tensor.copy_(_of(entry, made).reshape(tensor.shape))
        return
    for begin, end in _pieces(values, to):
        piece = replace(lay, part=_cut(lay.part, begin, end))
        read = [kept.rows(begin, end).to(to[0].device) for kept in values]
        decoded = decode_slot(read, piece, source) if source.coded else read[0].to(torch.float32)
        for entry, tensor, made in zip(entries, to, encode_slot(decoded, piece, slot), strict=True):
            target = tensor[begin:end] if tensor.ndim else tensor
            target.copy_(_of(entry, made).reshape(target.shape))


def _of(entry: Entry, made: Tensor) -> Tensor:
    """The columns of an entry, from all of them where they were worked on together."""
    for dim, follows in enumerate(entry.dims):
        if follows != 0 and made.shape[dim] != entry.local[dim]:
            made = made.narrow(dim, entry.offset[dim], entry.local[dim])
    return made


def _whole_rows(part: shard.Part) -> shard.Part:
    """The rows here with all of their columns, where blocks are cut between columns."""
    if part.cut != shard.CUT_ALL:
        return part
    return replace(
        part, local=(part.local[0], *part.shape[1:]), offset=(part.offset[0], *(0,) * (len(part.shape) - 1)),
        cuts=tuple((dim, group) for dim, group in part.cuts if dim == 0),
        follows=(0, *(-1,) * (len(part.shape) - 1)), begins=(), cut=0,
    )  # fmt: skip


def _cut(part: shard.Part, begin: int, end: int) -> shard.Part:
    """Rows [begin, end) of the part here."""
    if not part.local:
        return part
    offset = (part.offset[0] + begin, *part.offset[1:])
    return replace(part, local=(end - begin, *part.local[1:]), offset=offset)


@dataclass(frozen=True)
class Kept:
    """A saved tensor and which part of it is wanted here."""

    value: Tensor | Stored
    p: Tensor
    entry: Entry
    what: str

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the part here; the whole part where it has no dimensions."""
        e = self.entry
        if isinstance(self.value, Stored):
            if not e.local:
                return self.value.box((), ())
            offset = (e.offset[0] + begin, *e.offset[1:])
            return self.value.box(offset, (end - begin, *e.local[1:]))
        tensor = shard.take(self.value, self.p, e.shape, e.local, e.offset, e.follows, self.what)
        if tuple(tensor.shape) != e.local:
            raise ValueError(
                f"{self.what} has the local shape {tuple(tensor.shape)}, expected {e.local}"
            )
        return tensor[begin:end] if tensor.ndim else tensor


def _kept(value: Tensor | Stored, p: Tensor, entry: Entry, what: str) -> Kept:
    """Raises ValueError where the value cannot hold the part here."""
    shape = tuple(value.shape)
    here = not isinstance(value, Stored) and shape == entry.local
    if shape != entry.shape and not here:
        raise ValueError(
            f"{what} has the shape {shape}, which is neither the whole {entry.shape} nor this rank's part {entry.local}"
            if shard.is_sharded(p)
            else f"{what} has the local shape {shape}, expected {entry.local}"
        )
    return Kept(value, p, entry, what)


def _known_names(p: Tensor, lay: Layout, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's state under our names: SGD counts no steps, and Adafactor's means have the parameter's number of dimensions."""
    if lay.rule in ("sgd", "sgd_momentum") and "step" not in saved:
        buffer = saved.get("momentum_buffer")
        if buffer is None:  # before its first step
            return {
                "step": 0.0,
                "momentum_buffer": torch.zeros(lay.part.local, dtype=torch.float32),
            }
        return {"step": 1.0, "momentum_buffer": buffer}
    if "row_var" in saved and "col_var" in saved:
        row, col = saved["row_var"], saved["col_var"]
        return {**saved, "variance_row": row.squeeze(-1), "variance_col": col.squeeze(-2)}
    return saved


def _as_kept(
    p: Tensor, entries: Sequence[Entry], saved: Mapping[str, Any], key: Any, cast: str = ""
) -> list[Kept] | None:
    """The parts here of `entries` where the saved state has them in the very format, else None.

    Args:
        cast: the key under which another float dtype means a wide moment, which is converted as values.
    """
    if not all(isinstance(saved.get(entry.key), Tensor | Stored) for entry in entries):
        return None
    out = []
    for entry in entries:
        what, value = f"state[{key!r}][{entry.key!r}]", saved[entry.key]
        if value.dtype != entry.dtype:
            if entry.key == cast and value.is_floating_point():
                return None
            raise ValueError(
                f"{what} is {value.dtype}, not {entry.dtype}: the values were cast by the program that wrote or loaded them "
                "and cannot be recovered; save again without the cast"
            )
        out.append(_kept(value, p, entry, what))
    return out


def _source(
    p: Tensor, lay: Layout, slot: Slot, saved: Mapping[str, Any], key: Any
) -> tuple[Slot, list[Kept]]:
    """Where the slot's values come from: a wide or coded moment of any known format, and how it is kept."""
    for entry in ops.entries("state"):
        first = saved.get(
            slot.name if entry["name"] == "float32" else f"{slot.name}_{entry['name']}"
        )
        if not isinstance(first, Tensor | Stored):
            continue
        if type(first).__module__.startswith("torchao"):
            raise _unknown(saved, key, "it holds torchao tensor subclasses", "torchao")
        for source in _sources(slot.name, entry, lay, saved):
            entries = source.entries(lay.part)
            if not source.coded and first.is_floating_point():
                what, e = f"state[{key!r}][{source.key!r}]", entries[0]
                if not shard.is_sharded(p) and tuple(first.shape) != e.shape:
                    raise ValueError(
                        f"{what} is {first.dtype} {tuple(first.shape)} here, expected floating point {e.shape}"
                    )
                return source, [_kept(first, p, e, what)]
            kept = _as_kept(p, entries, saved, key)
            if kept is not None:
                return source, kept
    raise _unknown(saved, key, f"it has no {slot.name}")


def _sources(
    name: str, info: Mapping[str, Any], lay: Layout, saved: Mapping[str, Any]
) -> Iterator[Slot]:
    """The ways in which the saved state may keep a moment of a format: the block length follows from how many scales there are."""
    if not info["scaled"]:
        yield Slot(name, info["name"])
        return
    base = f"{name}_{info['name']}"
    scale = saved.get(base + "_scale")
    if isinstance(scale, Tensor | Stored) and scale.ndim == 2:
        for block in (info["block"], 32, 64, 128, 256, 512, 1024, 2048):
            slot = Slot(name, info["name"], block, "block")
            if slot.entries(lay.part)[1].shape[1] == scale.shape[1]:
                yield slot
                return
    for kind in ("row", "column", "tensor", "rank1"):
        if any(str(k).startswith(f"{base}_scale_{kind}") for k in saved):
            yield Slot(name, info["name"], 0, kind)


def _unknown(
    saved: Mapping[str, Any], key: Any, reason: str, peer: str | None = None
) -> ValueError:
    peer = peer or next((name for mark, name in PEERS.items() if mark in saved), None)
    origin = f"; it looks like the state of {peer}" if peer else ""
    return ValueError(
        f"state[{key!r}] is not a layout that can be loaded: {reason}{origin}. It holds {sorted(map(str, saved))}. Known are torch's Adam and AdamW "
        "(step, exp_avg, exp_avg_sq) and lowbit's own. Load it with the program that wrote it and save its moments in float32, or start "
        "with fresh state"
    )
