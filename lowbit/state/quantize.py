"""Conversion between float32 values and state tensors, for fresh and loaded state;
steps do it in the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.state.reduce_groups import reduce_groups
from lowbit.state.slot import Slot


def quantize_slot(values: Tensor, lay: Layout, slot: Slot) -> list[Tensor]:
    """The tensors of `slot.entries(lay.part)` for float32 `values` in the parameter's local shape.
    With cross-tile scales every rank with a part must call this at once: the maxima are reduced."""
    if not slot.coded:
        return [values.to(getattr(torch, ops.state_format(slot.format)["dtype"]))]
    matrix = values.reshape(lay.part.rows, lay.part.cols).contiguous()
    if not slot.cross_tile:
        return list(ops.quantize(matrix, slot.format, slot.block))
    scales = _maxima(values, lay, slot)
    codes = ops.quantize_given(matrix.cpu(), _spread(scales, lay, slot), slot.format)
    return [codes.to(values.device), *scales]


def quantize_decoded(values: Tensor, slot: Slot) -> list[Tensor]:
    """The codes and scales that dequantized blocks came from, as far as the values determine them.

    Quantizing mostly restores the same codes. It does not if a block's extreme is at the end of the
    map that is not 1 in magnitude (the lowest of bitsandbytes' signed dynamic maps, the highest of
    `uniform8`); such a block gets a scale with which the codes mean the same values.

    Args:
        values: float32 [rows, cols], dequantized.
        slot: their format, with scale="block".
    """
    info = ops.state_format(slot.format)
    codes, scales = (t.clone() for t in ops.quantize(values.contiguous(), slot.format, slot.block))
    again = ops.dequantize(codes, scales, slot.format, slot.block, values.shape[1])
    rows = ((again != values) & ~(again.isnan() & values.isnan())).any(1).nonzero()[:, 0]
    end = _short_end(slot.format) if info["scale_dtype"] == "float32" else 1.0
    if not rows.numel() or end == 1.0:
        return [codes, scales]
    some = values[rows].contiguous()
    width = scales.shape[1]
    padded = torch.nn.functional.pad(some, (0, width * slot.block - some.shape[1]))
    blocks = padded.reshape(len(rows), width, slot.block)
    absmax = blocks.abs().amax(2)
    right = _same(again[rows], some, slot.block, width)
    best = scales[rows]
    for off in (0, 1, -1, 2, -2):  # units in the last place, because the quotient is rounded
        guess = torch.where(
            right, best, ((absmax / end).view(torch.int32) + off).view(torch.float32)
        )
        spread = guess.repeat_interleave(slot.block, 1)[:, : some.shape[1]].contiguous()
        tried = ops.quantize_given(some.cpu(), spread.cpu(), slot.format).to(some.device)
        means = ops.dequantize(tried, guess.contiguous(), slot.format, slot.block, some.shape[1])
        found = _same(means, some, slot.block, width) & ~right
        best, right = torch.where(found, guess, best), right | found
    spread = best.repeat_interleave(slot.block, 1)[:, : some.shape[1]].contiguous()
    codes[rows] = ops.quantize_given(some.cpu(), spread.cpu(), slot.format).to(some.device)
    scales[rows] = best
    return [codes, scales]


def _same(a: Tensor, b: Tensor, block: int, width: int) -> Tensor:
    """Whether each block of the rows is equal: bool [rows, blocks]."""
    pad = (0, width * block - a.shape[1])
    return (
        torch.nn.functional.pad((a == b).float(), pad, value=1.0)
        .reshape(len(a), width, block)
        .amin(2)
        > 0
    )


@functools.cache
def _short_end(format: str) -> float:
    """The magnitude of a signed map's end whose other end is 1 or -1; 1 for all other maps."""
    x = torch.tensor([[1.0, -1.0, *[0.0] * 30]], dtype=torch.float32, device="cpu")
    values = ops.dequantize(*ops.quantize(x, format, 32), format, 32, 32)
    high, low = values[0, :2].tolist()
    signed = low < 0.0 < high and max(high, -low) == 1.0
    return min(high, -low) if signed else 1.0


def fresh_slot(value: float, lay: Layout, slot: Slot, device: torch.device) -> list[Tensor]:
    """The tensors of a slot that has `value` everywhere. No rank needs another rank's values."""
    if slot.coded and not slot.cross_tile:  # all rows are equal
        row = torch.full((1, lay.part.global_cols), value, dtype=torch.float32, device=device)
        return [
            tensor[:, e.offset[1] : e.offset[1] + e.local[1]].expand(e.local)
            for tensor, e in zip(
                ops.quantize(row, slot.format, slot.block), lay.of_slots[slot.name], strict=True
            )
        ]
    values = torch.full(lay.part.local, value, dtype=torch.float32, device=device)
    if not slot.cross_tile:
        return quantize_slot(values, lay, slot)
    scales = [
        torch.full(entry.local, abs(value), dtype=torch.float32, device=device)
        for entry in slot.entries(lay.part)[1:]
    ]
    matrix = values.reshape(lay.part.rows, lay.part.cols).cpu()
    codes = ops.quantize_given(matrix, _spread(scales, lay, slot), slot.format)
    return [codes.to(device), *scales]


def dequantize_slot(tensors: Sequence[Tensor], lay: Layout, slot: Slot) -> Tensor:
    """Float32 values in the parameter's local shape, from the tensors of
    `slot.entries(lay.part)`.
    """
    first = tensors[0].contiguous()
    if not slot.coded:
        return first.to(torch.float32)
    part = lay.part
    if slot.cross_tile:
        values = ops.dequantize_given(first.cpu(), _spread(tensors[1:], lay, slot), slot.format)
        return values.to(first.device).reshape(part.local)
    scales, lead = tensors[1], 0
    if part.cut == sharding.CUT_ALL:  # begin at the first block's start
        info, begin = ops.state_format(slot.format), part.col_offset // slot.block
        end = -(-(part.col_offset + part.cols) // slot.block)
        count, lead = info["scale_numbers"], part.col_offset % slot.block
        scales = scales[:, count * begin : count * max(begin, end)]
        first = torch.nn.functional.pad(first, (lead * info["bits"] // 8, 0))
    values = ops.dequantize(first, scales.contiguous(), slot.format, slot.block, lead + part.cols)
    return values[:, lead:].reshape(part.local)


def _maxima(values: Tensor, lay: Layout, slot: Slot) -> list[Tensor]:
    """The absmax that each of the slot's scales covers, over all shards. A collective."""
    # As integers: they are ordered like magnitudes, and NaN is above all others.
    bits = values.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)
    made = []
    groups = reduce_groups(lay)
    wanted = []
    for entry in slot.entries(lay.part)[1:]:
        if slot.scale == "column":
            source, keep = bits.reshape(lay.part.rows, lay.part.cols), [1]
        else:
            source, keep = bits, list(entry.dims)
        others = [d for d in range(source.ndim) if d not in keep]
        absmax = torch.zeros(entry.local, dtype=torch.int32, device=values.device)
        if source.numel():
            absmax.copy_(source.amax(others).reshape(entry.local) if others else source)
        made.append(absmax)
        over = (
            groups.totals
            if not entry.dims
            else groups.col_absmax
            if entry.dims[0]
            else groups.row_absmax
        )
        wanted += [(absmax, group, "max") for group in over]
    if wanted:
        sharding.reduce_over(wanted)
    nan = torch.tensor(0x7FC00000, dtype=torch.int32, device="cpu")  # the same on every processor
    made = [torch.where(m > 0x7F800000, nan.to(m.device), m) for m in made]
    return [absmax.view(torch.float32) for absmax in made]


def _spread(scales: Sequence[Tensor], lay: Layout, slot: Slot) -> Tensor:
    """The maximum behind each local element's scale: float32 [rows, cols] on the CPU."""
    part = lay.part
    least: Tensor | None = None
    for entry, scale in zip(slot.entries(part)[1:], scales, strict=True):
        bits = scale.cpu().contiguous().view(torch.int32)
        if slot.scale == "column":
            spread = bits.reshape(1, -1).expand(part.rows, part.cols)
        else:
            at = [part.local[d] if d in entry.dims else 1 for d in range(len(part.local))]
            spread = bits.reshape(at).expand(part.local).reshape(part.rows, part.cols)
        least = spread if least is None else torch.minimum(least, spread)
    assert least is not None
    return least.contiguous().view(torch.float32)
