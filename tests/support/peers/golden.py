"""What the tests of the peers' golden arrays share (tests/golden/README.md).

Each family of tests runs three things from the same inputs: lowbit, the peer's rule re-derived in
numpy with the peer's storage (which has to meet the golden arrays), and so knows for every step why
a code differs. The reasons have names, and each test prints how many codes each of them explains:

* midpoint: the value lies within a few units in the last place of the middle between two codes,
  where the peer has another tie rule or its arithmetic rounds differently (a scale that differs in
  its last bit included);
* zero: the peer stores a small positive second moment as zero, lowbit as the smallest step;
* carried: the element was stored differently in an earlier step for one of the other reasons, and
  has gone another way since.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from lowbit import ops
from tests.support.codes import table_of
from tests.support.paths import GOLDEN

F = np.float32


@functools.cache
def arrays(name="formats_golden"):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def gradients(shape, steps):
    return [arrays()[f"g{t}_{shape}"] for t in range(1, steps + 1)]


def explain(name, differ, reasons):
    """Prints each reason with its count and first places; fails where a difference has none."""
    left = differ.copy()
    print(f"{name}: {differ.sum()} of {differ.size} codes differ")
    for reason, where in reasons.items():
        hit = left & where
        left &= ~where
        if hit.any():
            places = " ".join(f"({','.join(map(str, at))})" for at in np.argwhere(hit)[:6])
            print(f"  {hit.sum()} by the {reason} rule, first at {places}")
    assert not left.any(), (
        f"{name}: {left.sum()} codes differ without a reason at {np.argwhere(left)[:6]}"
    )


def near_midpoint(z, table, ulps=2):
    """Where z lies within `ulps` units in the last place of the middle of two neighbouring
    entries.
    """
    middles = (table[1:].astype(np.float64) + table[:-1]) / 2
    near = np.abs(z[..., None].astype(np.float64) - middles).min(axis=-1)
    return near <= ulps * np.spacing(np.abs(z)).astype(np.float64)


def same_values(name, p, golden, gone, tolerance=5e-7):
    """Parameters are equal but where `gone` says that an element went another way."""
    apart = np.abs(p.reshape(-1).astype(np.float64) - golden.reshape(-1)) > tolerance
    print(f"{name}: {apart.sum()} parameters of {apart.size} went another way")
    assert not (apart & ~gone).any(), f"{name}: at {np.flatnonzero(apart & ~gone)[:6]}"


# Codes


def entries(format):
    """What a format's codes mean at scale 1, in the order of the codes."""
    return table_of(ops.state_format(format))


def unpack(codes, bits, *, high_first=False):
    """Codes of one byte each; of 4 bits, element 0 is in the low half of a byte (lowbit, lpmm) or
    in the high one (torchao, adafactor-8bit).
    """
    codes = np.asarray(codes).reshape(-1)
    if bits == 16:
        return codes.view(np.uint16).astype(np.int64)
    codes = codes.view(np.uint8).astype(np.int64)
    if bits == 8:
        return codes
    halves = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    return np.stack(halves, axis=1).reshape(-1)


def nearest(z, table, tie_up=True):
    """The index of the nearest entry; a tie goes to the larger value, or to the smaller one."""
    middles = (table[1:].astype(np.float64) + table[:-1]) / 2
    return np.searchsorted(middles, z.astype(np.float64), side="right" if tie_up else "left")


# Storage


class Stored(NamedTuple):
    """A tensor in a peer's storage, flat: codes, scales, what was rounded to a code,
    and what is read back.
    """

    codes: np.ndarray
    scale: np.ndarray
    z: np.ndarray
    value: np.ndarray


def blockwise(table, block, *, tie_up=True, floor=0.0, pick=nearest):
    """Blocks of the flattened tensor over their largest magnitudes."""

    def store(x):
        flat = x.reshape(-1)
        padded = np.zeros(-(-flat.size // block) * block, F)
        padded[: flat.size] = flat
        scale = np.maximum(np.abs(padded.reshape(-1, block)).max(axis=1), F(floor))
        wide = np.repeat(scale, block)[: flat.size]
        z = flat / wide
        codes = pick(z, table, tie_up)
        return Stored(codes, scale, z, (table[codes] * wide).reshape(x.shape))

    return store


def encoded(format, block):
    """Blocks of the flattened tensor by lowbit's own codec: for tensors that a peer cuts into
    blocks across rows, which lowbit never does.
    """

    def store(x):
        codes, scale = ops.quantize(torch.tensor(x.reshape(1, -1)), format, block)
        value = ops.dequantize(codes, scale, format, block, x.size).numpy()
        codes = unpack(codes.numpy(), ops.state_format(format)["bits"])[: x.size]
        return Stored(codes, scale.numpy().reshape(-1), np.zeros(0, F), value.reshape(x.shape))

    return store


def plain(x):
    """float32."""
    return Stored(np.zeros(0, int), np.zeros(0, F), x, x)


# The two that run


class Ours:
    """A lowbit optimizer with one parameter.

    Args:
        shape: the parameter's, where it is another than the array's.
        outside: state that lowbit keeps in float32 and that is stored and read back here after each
            step.
    """

    def __init__(self, optimizer, p0, *, shape=None, outside=None, dtype=torch.float32, **options):
        self.shape = p0.shape if shape is None else shape
        self.p = torch.nn.Parameter(torch.tensor(p0).reshape(self.shape).to(dtype))
        self.optimizer = optimizer([self.p], **options)
        self.outside, self.stored = outside or {}, {}

    @property
    def state(self):
        return self.optimizer.state[self.p]

    @property
    def values(self):
        return self.p.detach().numpy().reshape(-1)

    def step(self, g):
        self.p.grad = torch.tensor(g).reshape(self.shape).to(self.p.dtype)
        self.optimizer.step()
        for name, store in self.outside.items():
            self.stored[name] = kept = store(self.state[name].numpy().copy())
            self.state[name].copy_(torch.tensor(kept.value))

    def codes(self, name, format=None):
        if name in self.stored:
            return self.stored[name].codes
        codes = unpack(self.state[f"{name}_{format}"].numpy(), ops.state_format(format)["bits"])
        return codes[: self.p.numel()]

    def scale(self, name, format=None, suffix=""):
        if name in self.stored:
            return self.stored[name].scale
        return self.state[f"{name}_{format}_scale{suffix}"].numpy().reshape(-1)


class AdamTwin:
    """A peer's AdamW in float32 numpy: the update takes the moments before they are stored.

    Args:
        stores: for each moment a function that gives its `Stored`.
    """

    def __init__(self, p0, stores, *, lr, decay, beta1=0.9, beta2=0.999, eps=1e-8):
        self.p, self.stores, self.lr, self.decay = p0.copy(), stores, lr, decay
        self.beta1, self.beta2, self.eps, self.t = beta1, beta2, eps, 0
        self.stored = [plain(np.zeros_like(p0))] * 2

    def moments(self, g):
        m, v = (stored.value for stored in self.stored)
        m = m + F(1 - self.beta1) * (g - m)
        return m, F(self.beta2) * v + F(1 - self.beta2) * (g * g)

    def step(self, g):
        self.t += 1
        m, v = self.moments(g)
        c1, c2 = 1 - self.beta1**self.t, 1 - self.beta2**self.t
        self.p = self.p * F(1 - self.lr * self.decay)
        self.p = self.p - F(self.lr / c1) * (m / (np.sqrt(v) / F(c2**0.5) + F(self.eps)))
        self.stored = [store(x) for store, x in zip(self.stores, (m, v), strict=True)]


def middle(table):
    """Where the value of a `Stored` lies in the middle of two entries of a table."""
    return lambda stored: near_midpoint(stored.z, table)


def follow(name, ours, twin, gradients, slots, reasons=None):
    """Steps both and compares parameters and codes after each step.

    Args:
        slots: for each moment (name, format, a function of the twin's `Stored` that says where it
            is undecided between two codes; None where the moment has no codes).
        reasons: called with the moment's index, our codes and the twin's `Stored`;
            gives more reasons.

    Returns:
        Where an element of ours was stored differently in some step, and where the twin itself was
        undecided before the last step, so that the peer may have gone another way.
    """
    carried, undecided = (np.zeros(ours.values.size, bool) for _ in range(2))
    for t, g in enumerate(gradients, 1):
        twin.step(g)
        ours.step(g)
        moved = np.abs(ours.values - twin.p.reshape(-1))
        assert moved[~carried].max() <= 5e-7, f"{name}: step {t} moves p by {moved[~carried].max()}"
        now, unclear = (np.zeros_like(carried) for _ in range(2))
        for k, (slot, format, near) in enumerate(slots):
            if near is None:
                continue
            theirs, codes = twin.stored[k], ours.codes(slot, format)
            why = reasons(k, codes, theirs) if reasons else {}
            why |= {"midpoint": near(theirs), "carried": carried}
            differ = codes != theirs.codes
            explain(f"{name} {slot} step {t}", differ, why)
            now |= differ
            unclear |= near(theirs)
        carried |= now
        if t < len(gradients):
            undecided |= unclear
    return carried, undecided
