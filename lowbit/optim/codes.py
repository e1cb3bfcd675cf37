"""How often the codes of a quantized state occur,
counted without dequantizing where a code alone tells its meaning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.state.quantize import dequantize_slot
from lowbit.state.slot import Slot

_AT_ONCE = 1 << 20  # values to process at a time
# Between these scales a code of a format with one scale per block means 0 for all scales or for
# none.
ORDINARY = (2.0**-80, 2.0**80)


def use_of_codes(lay: Layout, slot: Slot, state: Mapping[str, Tensor]) -> dict[str, float]:
    """The tally of a slot's codes here, every one of them; empty if the slot has none."""
    if not slot.coded:
        return {}
    part, bits = lay.part, ops.state_format(slot.format)["bits"]
    tensors = [sharding.local(state[entry.key]) for entry in lay.of_slots[slot.name]]
    counts = _counts(lay, slot, tensors, 0, part.cols)
    if tensors[0].numel():  # what other ranks have of a flat shard's first and last row
        first, last = (_rows(lay, slot, tensors, i) for i in (slice(1), slice(-1, None)))
        counts -= _counts(lay, slot, first, 0, part.front)
        counts -= _counts(lay, slot, last, part.cols - part.back, part.cols)
    every, zeros = counts.cpu()
    values = int(every.sum())
    return {
        "coded": values,
        "saturated": int((every - zeros)[ends_of(slot.format)].sum()),
        "zero": int(zeros.sum()),
        "used": int((every > 0).sum()),
        "levels": (1 << bits) if values else 0,
    }


def _rows(lay: Layout, slot: Slot, tensors: list[Tensor], chosen: Tensor | slice) -> list[Tensor]:
    """Some rows of a slot's codes, and of its scales."""
    entries = lay.of_slots[slot.name]
    follow = [entry.dims[:1] == (0,) for entry in entries]
    return [t[chosen] if rows else t for t, rows in zip(tensors, follow, strict=True)]


def _counts(lay: Layout, slot: Slot, tensors: list[Tensor], begin: int, end: int) -> Tensor:
    """How often each code occurs in columns begin .. end of some rows,
    and how often it means 0: int64 [2, codes].

    Codes are only dequantized in rows with a scale so small or large (or 0, or not finite) that a
    code does not tell whether its value is 0, and in formats with several numbers for each scale.
    """
    info, codes = ops.state_format(slot.format), tensors[0]
    bits, cols = info["bits"], lay.part.cols
    counts = torch.zeros((2, 1 << bits), dtype=torch.int64, device=codes.device)
    if not codes.numel() or begin >= end:
        return counts
    told = _told(lay, slot, tensors)
    if told.any():
        counts[0] += count_codes(codes if told.all() else codes[told], bits, begin, end)
        counts[1] += counts[0] * (values_of(slot.format) == 0).to(codes.device)
    for chosen in (~told).nonzero()[:, 0].split(max(1, _AT_ONCE // cols)):
        some = _rows(lay, slot, tensors, chosen)
        part = replace(lay.part, local=(len(chosen), *lay.part.local[1:]))
        values = dequantize_slot(some, replace(lay, part=part), slot)
        single = unpack(some[0], bits, cols)[:, begin:end]
        zeros = single[values.reshape(-1, cols)[:, begin:end] == 0]
        counts[0] += torch.bincount(single.reshape(-1), minlength=1 << bits)
        counts[1] += torch.bincount(zeros, minlength=1 << bits)
    return counts


def _told(lay: Layout, slot: Slot, tensors: list[Tensor]) -> Tensor:
    """The rows in which a code tells whether its value is 0: bool [rows]."""
    one = ops.state_format(slot.format)["scale_numbers"] == 1
    codes, *scales = tensors
    made = torch.full((len(codes),), one, dtype=torch.bool, device=codes.device)
    for entry, scale in zip(lay.of_slots[slot.name][1:], scales if one else (), strict=False):
        wide = scale.float()  # in float16 the limits would become 0 and infinity
        ordinary = (wide >= ORDINARY[0]) & (wide <= ORDINARY[1])
        by_row = entry.dims[:1] == (0,)
        made &= ordinary.reshape(len(codes), -1).all(1) if by_row else ordinary.all()
    return made


def count_codes(codes: Tensor, bits: int, begin: int, end: int) -> Tensor:
    """How often each code occurs in columns begin ..
    end of codes [rows, bytes]: int64 [1 << bits].
    """
    if 8 % bits or (begin * bits) % 8:
        made = torch.zeros(1 << bits, dtype=torch.int64, device=codes.device)
        for some in codes.split(max(1, _AT_ONCE // end)):
            single = unpack(some, bits, end)[:, begin:]
            made += torch.bincount(single.reshape(-1), minlength=1 << bits)
        return made
    first, last = begin * bits // 8, end * bits // 8  # of whole bytes
    whole = torch.bincount(codes[:, first:last].reshape(-1), minlength=256)
    if bits == 8:
        return whole
    byte = torch.arange(256, device=codes.device)
    made = torch.zeros(1 << bits, dtype=torch.int64, device=codes.device)
    for shift in range(0, 8, bits):
        made.index_add_(0, (byte >> shift) & ((1 << bits) - 1), whole)
    if rest := end - last * 8 // bits:
        single = unpack(codes[:, last : last + 1], bits, rest)
        made += torch.bincount(single.reshape(-1), minlength=1 << bits)
    return made


def unpack(codes: Tensor, bits: int, cols: int) -> Tensor:
    """Unpacks codes [rows, bytes] to int64 [rows, cols]; the first code is in the low bits."""
    shared = math.gcd(bits, 8)
    size, count = bits // shared, 8 // shared  # so many bytes hold so many codes
    groups = -(-cols // count)
    codes = codes[:, : groups * size].to(torch.int64)
    codes = torch.nn.functional.pad(codes, (0, groups * size - codes.shape[1]))
    byte, code = (torch.arange(n, device=codes.device) for n in (size, count))
    words = (codes.reshape(-1, groups, size) << (8 * byte)).sum(-1)
    single = (words[:, :, None] >> (bits * code)) & ((1 << bits) - 1)
    return single.reshape(-1, groups * count)[:, :cols]


@functools.cache
def values_of(format: str) -> Tensor:
    """The float32 value of every code of a format in a block whose largest magnitude is 1,
    on the CPU.
    """
    info = ops.state_format(format)
    bits, length, cpu = info["bits"], 2048, torch.device("cpu")
    sample = torch.exp2(-(torch.arange(length, device=cpu) % 21).float())
    if info["signed"]:
        sample[length // 2 :] *= -1
    _, scales = ops.quantize(sample.reshape(1, -1), format, length)
    cols = min(1 << bits, length)
    every = torch.arange(1 << bits, device=cpu).reshape(-1, cols)
    single = (every[:, :, None] >> torch.arange(bits, device=cpu)) & 1
    packed = (single.reshape(len(every), -1, 8) << torch.arange(8, device=cpu)).sum(-1)
    scales = scales.expand(len(every), -1).contiguous()
    return ops.dequantize(packed.to(torch.uint8), scales, format, length, cols).reshape(-1)


@functools.cache
def ends_of(format: str) -> Tensor:
    """The codes of the lowest and highest value but 0,
    which values outside the format's range become.
    """
    values, signed = values_of(format), ops.state_format(format)["signed"]
    usable = values[values.isfinite() & ((values != 0) if signed else (values > 0))]
    return ((values == usable.min()) | (values == usable.max())).nonzero().reshape(-1)
