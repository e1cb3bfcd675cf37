"""One parameter's loaded state, in whatever known layout, as this optimizer keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, shard
from lowbit.coding import decode_slot, encode_slot
from lowbit.layout import Entry, Layout, Slot

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


def adopt_state(p: Tensor, lay: Layout, saved: Mapping[str, Any], key: Any) -> dict[str, Tensor]:
    """This optimizer's state of parameter p from saved state: moved where it fits, decoded and encoded where it does not.

    Args:
        key: the state dict's name for p, for errors.

    Raises:
        ValueError: a moment is missing, or its layout is unknown.
    """
    device = shard.local(p).device
    saved = _known_names(p, lay, saved)
    step = saved.get("step", None)
    if step is None:
        raise _unknown(saved, key, "it has no 'step'")
    step = shard.local(step) if isinstance(step, Tensor) else torch.tensor(float(step))
    stream = saved.get("stream", lay.stream)
    stream = int(shard.local(stream)) if isinstance(stream, Tensor) else int(stream)
    state: dict[str, Tensor] = {
        # copies: torch hands out references, and two optimizers would count one step twice
        "step": step.detach()
        .to(torch.float32)
        .reshape(())
        .to(device if device.type == "cuda" else "cpu", copy=True),
        "stream": torch.tensor(stream, dtype=torch.int64),
    }
    for slot in lay.slots:
        entries = slot.entries(lay.part)
        tensors = _as_kept(p, entries, saved, key, cast=slot.name)
        if tensors is None:
            tensors = encode_slot(_values(p, lay, slot, saved, key).to(device), lay, slot)
        _put(state, p, entries, tensors)
    for entry in lay.others:
        tensors = _as_kept(p, [entry], saved, key, cast=entry.key)
        if tensors is None:
            if entry.shape:
                raise _unknown(saved, key, f"it has no {entry.key}")
            tensors = [torch.zeros(())]  # a norm that torch does not keep: what a first step finds
        _put(state, p, [entry], tensors)
    if lay.extra:  # absent where the parameter was plain before: then nothing is known beside it
        tensors = _as_kept(p, [lay.extra], saved, key)
        other = next((str(k) for k in saved if str(k).startswith("param_")), None)
        if tensors is None and other is not None:
            raise ValueError(
                f"state[{key!r}] keeps {other!r} beside the weight, this optimizer {lay.extra.key!r}: load it with the format it was saved with, and take "
                "lowbit.get_fp32_model_state_dict from there to another format"
            )
        zeros = torch.zeros(lay.extra.local, dtype=lay.extra.dtype)
        _put(state, p, [lay.extra], tensors or [zeros])
    return state


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


def _put(
    state: dict[str, Tensor], p: Tensor, entries: Sequence[Entry], tensors: Sequence[Tensor]
) -> None:
    device = shard.local(p).device
    for entry, tensor in zip(entries, tensors, strict=True):
        local = tensor.to(device).reshape(entry.local).contiguous()
        state[entry.key] = shard.like(p, local, entry.shape, entry.follows)


def _as_kept(
    p: Tensor, entries: Sequence[Entry], saved: Mapping[str, Any], key: Any, cast: str = ""
) -> list[Tensor] | None:
    """The local tensors of `entries` where the saved state has them in the very format, else None.

    Args:
        cast: the key under which another float dtype means a wide moment, which is converted as values.
    """
    if not all(isinstance(saved.get(entry.key), Tensor) for entry in entries):
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
        tensor = shard.take(value, p, entry.shape, entry.local, entry.offset, entry.follows, what)
        if tuple(tensor.shape) != entry.local:
            raise ValueError(
                f"{what} has the local shape {tuple(tensor.shape)}, expected {entry.local}"
            )
        out.append(tensor)
    return out


def _values(p: Tensor, lay: Layout, slot: Slot, saved: Mapping[str, Any], key: Any) -> Tensor:
    """The slot's values here, float32 in the parameter's local shape, from a wide or coded moment of any known format."""
    for entry in ops.catalog()["state"]:
        first = saved.get(
            slot.name if entry["name"] == "float32" else f"{slot.name}_{entry['name']}"
        )
        if not isinstance(first, Tensor):
            continue
        if type(first).__module__.startswith("torchao"):
            raise _unknown(saved, key, "it holds torchao tensor subclasses", "torchao")
        for source in _sources(slot.name, entry, lay, saved):
            entries = source.entries(lay.part)
            if not source.coded and first.is_floating_point():
                what = f"state[{key!r}][{source.key!r}]"
                e = entries[0]
                local = shard.take(first, p, e.shape, e.local, e.offset, e.follows, what)
                if tuple(local.shape) != e.local:
                    raise ValueError(f"{what} is {local.dtype} {tuple(local.shape)} here, expected floating point {e.local}")  # fmt: skip
                return local.to(torch.float32)
            tensors = _as_kept(p, entries, saved, key)
            if tensors is not None:
                return decode_slot(tensors, lay, source)
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
    if isinstance(scale, Tensor) and scale.ndim == 2:
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
