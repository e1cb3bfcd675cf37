"""State values to the tensors that keep them, and back: for fresh and loaded state, not for steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit import ops, shard
from lowbit.batch import reductions
from lowbit.layout import Layout, Slot


def encode_slot(values: Tensor, lay: Layout, slot: Slot) -> list[Tensor]:
    """The tensors of `slot.entries(lay.part)` for float32 `values` in the parameter's local shape. With measured scales every holder of a part
    must call this at once: the maxima are reduced."""
    if not slot.coded:
        return [values.to(getattr(torch, ops.state_format(slot.format)["dtype"]))]
    matrix = values.reshape(lay.part.rows, lay.part.cols).contiguous()
    if not slot.measured:
        return list(ops.encode(matrix, slot.format, slot.block))
    scales = _maxima(values, lay, slot)
    codes = ops.encode_given(matrix.cpu(), _spread(scales, lay, slot), slot.format)
    return [codes.to(values.device), *scales]


def encode_decoded(values: Tensor, slot: Slot) -> list[Tensor]:
    """Codes and scales of blocks whose float32 [rows, cols] `values` were decoded from some: those very codes where encoding gives them back, or where
    the block's extreme is the map's lowest value and that is not -1 (bitsandbytes' signed dynamic maps) a scale by which they mean the same values."""
    info = ops.state_format(slot.format)
    codes, scales = (t.clone() for t in ops.encode(values.contiguous(), slot.format, slot.block))
    again = ops.decode(codes, scales, slot.format, slot.block, values.shape[1])
    rows = ((again != values) & ~(again.isnan() & values.isnan())).any(1).nonzero()[:, 0]
    low = _lowest(slot.format) if info["measurable"] and info["scale_dtype"] == "float32" else -1.0
    if not rows.numel() or low in (0.0, -1.0):
        return [codes, scales]
    some = values[rows].contiguous()
    width = scales.shape[1]
    padded = torch.nn.functional.pad(some, (0, width * slot.block - some.shape[1]))
    blocks = padded.reshape(len(rows), width, slot.block)
    most = blocks.abs().amax(2)
    right = _same(again[rows], some, slot.block, width)
    best = scales[rows]
    for off in (0, 1, -1, 2, -2):  # units in the last place, for the quotient is rounded
        guess = torch.where(
            right, best, ((most / -low).view(torch.int32) + off).view(torch.float32)
        )
        wide = guess.repeat_interleave(slot.block, 1)[:, : some.shape[1]].contiguous()
        tried = ops.encode_given(some.cpu(), wide.cpu(), slot.format).to(some.device)
        means = ops.decode(tried, guess.contiguous(), slot.format, slot.block, some.shape[1])
        found = _same(means, some, slot.block, width) & ~right
        best, right = torch.where(found, guess, best), right | found
    wide = best.repeat_interleave(slot.block, 1)[:, : some.shape[1]].contiguous()
    codes[rows] = ops.encode_given(some.cpu(), wide.cpu(), slot.format).to(some.device)
    scales[rows] = best
    return [codes, scales]


def _same(a: Tensor, b: Tensor, block: int, width: int) -> Tensor:
    """Which blocks of the rows are equal."""
    pad = (0, width * block - a.shape[1])
    return torch.nn.functional.pad((a == b).float(), pad, value=1.0).reshape(len(a), width, block).amin(2) > 0  # fmt: skip


@functools.cache
def _lowest(format: str) -> float:
    """The lowest value of a map whose highest is 1; -1 where its highest is another."""
    x = torch.tensor([[1.0, -1.0, *[0.0] * 30]], device="cpu")
    values = ops.decode(*ops.encode(x, format, 32), format, 32, 32)
    return float(values[0, 1]) if float(values[0, 0]) == 1.0 else -1.0


def fresh_slot(value: float, lay: Layout, slot: Slot, device: torch.device) -> list[Tensor]:
    """The tensors of a slot that holds `value` everywhere; no rank needs another for it."""
    if slot.coded and not slot.measured:  # a row like any other
        row = torch.full((1, lay.part.global_cols), value, dtype=torch.float32, device=device)
        return [
            tensor[:, e.offset[1] : e.offset[1] + e.local[1]].expand(e.local)
            for tensor, e in zip(
                ops.encode(row, slot.format, slot.block), lay.of_slots[slot.name], strict=True
            )
        ]
    values = torch.full(lay.part.local, value, dtype=torch.float32, device=device)
    if not slot.measured:
        return encode_slot(values, lay, slot)
    scales = [
        torch.full(entry.local, abs(value), dtype=torch.float32, device=device)
        for entry in slot.entries(lay.part)[1:]
    ]
    matrix = values.reshape(lay.part.rows, lay.part.cols).cpu()
    codes = ops.encode_given(matrix, _spread(scales, lay, slot), slot.format)
    return [codes.to(device), *scales]


def decode_slot(tensors: Sequence[Tensor], lay: Layout, slot: Slot) -> Tensor:
    """Float32 values in the parameter's local shape from the tensors of `slot.entries(lay.part)`."""
    first = tensors[0].contiguous()
    if not slot.coded:
        return first.to(torch.float32)
    part = lay.part
    if slot.measured:
        values = ops.decode_given(first.cpu(), _spread(tensors[1:], lay, slot), slot.format)
        return values.to(first.device).reshape(part.local)
    scales, lead = tensors[1], 0
    if part.cut == shard.CUT_ALL:  # from where the first block begins
        info, begin = ops.state_format(slot.format), part.col_offset // slot.block
        end = -(-(part.col_offset + part.cols) // slot.block)
        count, lead = info["scale_numbers"], part.col_offset % slot.block
        scales = scales[:, count * begin : count * max(begin, end)]
        first = torch.nn.functional.pad(first, (lead * info["bits"] // 8, 0))
    values = ops.decode(first, scales.contiguous(), slot.format, slot.block, lead + part.cols)
    return values[:, lead:].reshape(part.local)


def _maxima(values: Tensor, lay: Layout, slot: Slot) -> list[Tensor]:
    """The largest magnitudes that each of the slot's scales covers, over all shards."""
    # As integers: ordered like magnitudes, and a NaN is above all else.
    bits = values.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)
    made = []
    groups = reductions(lay)
    wanted = []
    for entry in slot.entries(lay.part)[1:]:
        if slot.scale == "column":
            source, keep = bits.reshape(lay.part.rows, lay.part.cols), [1]
        else:
            source, keep = bits, list(entry.dims)
        others = [d for d in range(source.ndim) if d not in keep]
        most = torch.zeros(entry.local, dtype=torch.int32, device=values.device)
        if source.numel():
            most.copy_(source.amax(others).reshape(entry.local) if others else source)
        made.append(most)
        over = (
            groups.all if not entry.dims else groups.col_most if entry.dims[0] else groups.row_most
        )
        wanted += [(most, group, "max") for group in over]
    if wanted:
        shard.reduce_over(wanted)
    nan = torch.tensor(0x7FC00000, dtype=torch.int32, device="cpu")  # one for every processor
    made = [torch.where(m > 0x7F800000, nan.to(m.device), m) for m in made]
    return [most.view(torch.float32) for most in made]


def _spread(scales: Sequence[Tensor], lay: Layout, slot: Slot) -> Tensor:
    """For each element of the part here the maximum that its scale is made of, float32 [rows, cols] on the CPU."""
    part = lay.part
    least: Tensor | None = None
    for entry, scale in zip(slot.entries(part)[1:], scales, strict=True):
        bits = scale.cpu().contiguous().view(torch.int32)
        if slot.scale == "column":
            wide = bits.reshape(1, -1).expand(part.rows, part.cols)
        else:
            at = [part.local[d] if d in entry.dims else 1 for d in range(len(part.local))]
            wide = bits.reshape(at).expand(part.local).reshape(part.rows, part.cols)
        least = wide if least is None else torch.minimum(least, wide)
    assert least is not None
    return least.contiguous().view(torch.float32)
