"""Codes and their domains in numpy: packing, tables of what codes mean under given scales,
and brute force.
"""

import os
import re

import numpy as np
import torch

from lowbit import ops

F = np.float32
ONLY = os.environ.get("LOWBIT_TEST_FORMAT")  # one format alone
CODED = [s for s in ops.catalog()["state"] if s["scaled"] and ONLY in (None, s["name"])]


def family(format):
    """Formats of one family are tested by one item."""
    return re.match("[a-z]+", format["name"]).group()


def pack(codes, bits):
    """Codes [rows, n] -> bytes [rows, ceil(n * bits / 8)], LSB first."""
    codes = np.asarray(codes, np.uint32)
    each = (codes[..., None] >> np.arange(bits, dtype=np.uint32) & 1).astype(np.uint8)
    return np.packbits(each.reshape(codes.shape[0], -1), axis=1, bitorder="little")


def unpack(packed, bits, n):
    """The inverse of `pack`."""
    each = np.unpackbits(np.asarray(packed), axis=1, count=n * bits, bitorder="little")
    weights = 1 << np.arange(bits, dtype=np.uint32)
    return each.reshape(-1, n, bits).astype(np.uint32) @ weights


def bits_of(tensor):
    """What can be compared whatever is in it."""
    return tensor.contiguous().view(torch.uint8)


def one_scale(format, heads):
    """The scale numbers of blocks that hold `heads` [rows, n]: [rows, scale_numbers]."""
    heads = np.asarray(heads, F)
    block = np.zeros((heads.shape[0], 32), F)
    block[:, : heads.shape[1]] = heads
    return ops.quantize(torch.from_numpy(block), format["name"], 32)[1]


def values_of_codes(format, scales):
    """What every code means under each scale: scales [rows, scale_numbers] -> float32 [rows, 2 **
    bits].
    """
    bits, rows = format["bits"], scales.shape[0]
    n = 2**bits
    block = min(2048, max(32, n))
    codes = torch.from_numpy(pack(np.arange(n)[None], bits)).expand(rows, -1).contiguous()
    held = scales.repeat(1, -(-n // block))
    return ops.dequantize(codes, held, format["name"], block, n).numpy()


def table_of(format):
    """The value of every code at scale 1, float32 [2 ** bits]."""
    return values_of_codes(format, torch.ones(1, 1))[0]


def unit(format):
    """A magnitude whose scale is 1, so that z is the value itself: the largest of a code at
    scale 1.
    """
    dtype = getattr(torch, format["scale_dtype"])
    one = values_of_codes(format, torch.ones(1, format["scale_numbers"], dtype=dtype))
    return F(np.abs(one[np.isfinite(one)]).max())


def anchors(format):
    """The values, one list for each kind of block, that fix a block's scale."""
    if format["domain"] != "log2":
        return [[unit(format)]]
    tops = (1.0, 1.7e30, 1.3e-30)
    if format["scale_numbers"] == 1:
        return [[top] for top in tops]
    return [[top, top * down] for top in tops for down in (0.9, 2.0**-20, 2.0**-26)]


class Table:
    """The values that codes of one format have under one scale, in ascending order,
    and brute force over them.
    """

    def __init__(self, format, scale):
        """scale: [1, scale_numbers]"""
        self.format, self.scale = format, scale
        self.raw = values_of_codes(format, scale)[0]
        finite = self.raw[np.isfinite(self.raw)]
        if not format["signed"]:
            finite = finite[finite >= 0]  # float8: codes with a sign are never written
        self.values = np.unique(finite).astype(np.float64)  # -0 is 0
        self.top = float(np.abs(self.values).max())
        self.least = float(np.abs(self.values[self.values != 0]).min(initial=np.inf))

    def bend(self, x):
        """Into the domain in which a code is the nearest."""
        x = np.asarray(x, np.float64)
        domain = self.format["domain"]
        if domain == "linear":
            return x  # exact, so that ties are ties
        if domain == "sqrt":
            return np.sqrt(x / self.top)
        if domain == "softsign":
            z = x / self.top
            return 2 * z / (1 + np.abs(z))
        assert domain == "log2", f"{self.format['name']}: a domain that this twin does not know"
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(np.abs(x))

    @property
    def slack(self):
        """What float32 arithmetic may add to a distance in the domain."""
        return {"linear": 0.0, "sqrt": 4e-7, "softsign": 4e-7, "log2": 8e-5}[self.format["domain"]]

    @property
    def unit(self):
        """What slack is counted in."""
        return self.top if self.format["domain"] == "linear" else 1.0

    def distance(self, x, y):
        """Between values x and values of codes y in the domain;
        infinite where y is not allowed for x.
        """
        with np.errstate(invalid="ignore"):  # zero and zero have no logarithm
            d = np.abs(self.bend(x) - self.bend(y))
        if self.format["domain"] == "log2":  # zero stands apart, and signs do
            cut = self.least / 2 * (1 + 1e-6 * np.array([-1, 1]))
            a = np.abs(x)
            zero = (y == 0) & (a <= (cut[1] if self.format["signed"] else 0))
            other = (y != 0) & (np.sign(x) == np.sign(y))
            if self.format["signed"]:
                other &= a >= cut[0]
            elif 0 not in self.values:
                other |= x == 0  # no zero: the least there is
                d = np.where(x == 0, y / self.least - 1, d)
            d = np.where(zero, 0.0, np.where(other, d, np.inf))
            if self.format["signed"]:  # between the two either may be taken
                d = np.where((a >= cut[0]) & (a <= cut[1]), np.where(np.isfinite(d), 0.0, d), d)
        elif not self.format["signed"]:  # a positive value never becomes zero
            d = np.where((y == 0) & (x > 0), np.inf, d)
        return d

    def around(self, x):
        """Candidates for the nearest: all values where there are few, else four around each x.
        [n, candidates]
        """
        if self.values.size <= 256:
            return np.broadcast_to(self.values, (x.size, self.values.size))
        at = np.searchsorted(self.values, x)[:, None] + np.arange(-2, 2)
        return self.values[np.clip(at, 0, self.values.size - 1)]

    def nearest(self, x):
        """The smallest distance there is for each x, float64 [n]."""
        x = np.asarray(x, np.float64).reshape(-1)
        return self.distance(x[:, None], self.around(x)).min(axis=1)

    def half_gap(self, x):
        """Half of the gap of the domain in which x lies;
        infinite where values are missing for one.
        """
        v = self.values
        above = np.clip(np.searchsorted(v, x), 1, v.size - 1)
        return np.abs(self.bend(v[above]) - self.bend(v[above - 1])) / 2

    def check(self, x, got, what, slack=None):
        """Every decoded `got` is a value of a code, and the nearest to its x."""
        x, got = np.asarray(x, np.float64).reshape(-1), np.asarray(got, np.float64).reshape(-1)
        best = self.nearest(x)
        mine = self.distance(x, got)
        wrong = np.flatnonzero(
            ~(mine <= best + (self.slack if slack is None else slack) * self.unit)
        )
        assert wrong.size == 0, (
            f"{what}: {wrong.size} of {x.size} are not the nearest: values {x[wrong[:4]]} became "
            f"{got[wrong[:4]]}, {mine[wrong[:4]]} away instead of {best[wrong[:4]]}"
        )
