"""One parameter's loaded state, in whatever known layout, as this optimizer keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, shard
from lowbit.layout import Layout, Slot

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
        tensors = _as_kept(p, lay, slot, saved, key)
        if tensors is None:
            values = _values(p, lay, slot, saved, key).to(device)
            tensors = _encode(values, lay, slot)
        for name, tensor, shape in zip(slot.keys, tensors, lay.global_shapes(slot), strict=True):
            state[name] = shard.like(p, tensor.to(device).contiguous(), shape)
    return state


def _as_kept(
    p: Tensor, lay: Layout, slot: Slot, saved: Mapping[str, Any], key: Any
) -> list[Tensor] | None:
    """The slot's local tensors where the saved state has them in the very format, else None."""
    if not all(isinstance(saved.get(name), Tensor) for name in slot.keys):
        return None
    dtype = getattr(torch, ops.state_format(slot.format)["dtype"])
    out = []
    for name, shape, wanted in zip(
        slot.keys, lay.local_shapes(slot), (dtype, torch.float32), strict=False
    ):
        if saved[name].dtype != wanted:
            if name == slot.name and saved[name].is_floating_point():
                return None  # a wide moment in another float dtype: converted, as values
            raise ValueError(
                f"state[{key!r}][{name!r}] is {saved[name].dtype}, not {wanted}: the values were cast by the program that wrote or loaded them "
                "and cannot be recovered; save again without the cast"
            )
        tensor = shard.take(saved[name], p, lay.part, f"state[{key!r}][{name!r}]")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"state[{key!r}][{name!r}] has the local shape {tuple(tensor.shape)}, expected {shape}"
            )
        out.append(tensor)
    return out


def _values(p: Tensor, lay: Layout, slot: Slot, saved: Mapping[str, Any], key: Any) -> Tensor:
    """The slot's values here, float32 in the parameter's local shape, from a wide or coded moment of any known format."""
    part = lay.part
    for entry in ops.catalog()["state"]:
        source = Slot(slot.name, entry["name"], entry["block"])
        if not all(isinstance(saved.get(name), Tensor) for name in source.keys):
            continue
        what = f"state[{key!r}][{source.keys[0]!r}]"
        if type(saved[source.keys[0]]).__module__.startswith("torchao"):
            raise _unknown(saved, key, "it holds torchao tensor subclasses", "torchao")
        first = shard.take(saved[source.keys[0]], p, part, what)
        if not source.coded:
            if not first.is_floating_point() or tuple(first.shape) != part.local:
                raise ValueError(
                    f"{what} is {first.dtype} {tuple(first.shape)} here, expected floating point {part.local}"
                )
            return first.to(torch.float32)
        scales = shard.take(saved[source.keys[1]], p, part, what).contiguous()
        values = ops.decode(first.contiguous(), scales, source.format, source.block, part.cols)
        return values.reshape(part.local)
    raise _unknown(saved, key, f"it has no {slot.name}")


def _encode(values: Tensor, lay: Layout, slot: Slot) -> list[Tensor]:
    if not slot.coded:
        return [values.to(getattr(torch, ops.state_format(slot.format)["dtype"]))]
    matrix = values.reshape(lay.part.rows, lay.part.cols).contiguous()
    return list(ops.encode(matrix, slot.format, slot.block))


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
