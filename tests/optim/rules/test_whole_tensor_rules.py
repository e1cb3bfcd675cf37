"""Rules that measure the whole tensor before they update it, against references in float64, of
their papers. Adafactor: tests/optim/test_torch_parity.py.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import lowbit

SHAPE = (24, 40)
FACTORED = {"exp_avg": "float32", "exp_avg_sq": "factored"}


class Reference:
    """Its state by name, zeros at first."""

    def __init__(self, **options):
        self.t, self.s, self.o = 0, {}, options

    def lerp(self, name, value, weight):
        self.s[name] = self.s.get(name, np.zeros_like(value))
        self.s[name] = self.s[name] + (value - self.s[name]) * weight
        return self.s[name]

    def factored(self, name, square, weight):
        """Row times column means, divided by the rows' mean."""
        rows = self.lerp(name + " rows", square.mean(axis=1), weight)
        cols = self.lerp(name + " cols", square.mean(axis=0), weight)
        return np.outer(rows, cols) / rows.mean()


class Lamb(Reference):
    def step(self, p, g):
        o, t = self.o, self.t
        beta1, beta2 = 0.9, 0.999
        m = self.lerp("m", g, 1 - beta1) / (1 - beta1**t)
        v = self.lerp("v", g * g, 1 - beta2) / (1 - beta2**t)
        r = m / (np.sqrt(v) + 1e-8) + o["weight_decay"] * p
        ratio = np.linalg.norm(p) / np.linalg.norm(r) if p.any() and r.any() else 1.0
        return p - o["lr"] * ratio * r


class Lars(Reference):
    def step(self, p, g):
        o = self.o
        length, decay, damping = np.linalg.norm(p), o["weight_decay"], o.get("dampening", 0.0)
        q = 1.0
        if length and g.any():
            q = o["trust_coefficient"] * length / (np.linalg.norm(g) + decay * length + 1e-8)
        d = (g + decay * p) * q
        old = self.s.get("buffer")
        self.s["buffer"] = d if old is None else o["momentum"] * old + (1 - damping) * d
        ahead = d + o["momentum"] * self.s["buffer"]
        return p - o["lr"] * (ahead if o.get("nesterov") else self.s["buffer"])


class Came(Reference):
    def step(self, p, g):
        o, (beta1, beta2, beta3) = self.o, (0.9, 0.999, 0.9999)
        u = g / np.sqrt(self.factored("v", g * g + 1e-30, 1 - beta2))
        u = u / max(1.0, math.sqrt((u * u).mean()) / 1.0)
        m = self.lerp("m", u, 1 - beta1)
        w = self.factored("w", (u - m) ** 2 + 1e-16, 1 - beta3)
        return p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * m / np.sqrt(w)


class Factored(Reference):
    def step(self, p, g):
        o, t = self.o, self.t
        if o["decoupled"]:
            p = p * (1 - o["lr"] * o["weight_decay"])
        else:
            g = g + o["weight_decay"] * p
        m = self.lerp("m", g, 0.1) / (1 - 0.9**t)
        v = self.factored("v", g * g, 1e-3) / (1 - 0.999**t)
        return p - o["lr"] * m / (np.sqrt(v) + 1e-8)


LARS = {"lr": 3.0, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 1e-2}
CASES = {
    "LAMB": (lowbit.LAMB, Lamb, {"lr": 1e-2, "weight_decay": 0.1}),
    "LARS": (lowbit.LARS, Lars, LARS),
    "LARS dampened": (lowbit.LARS, Lars, LARS | {"dampening": 0.3}),
    "LARS Nesterov": (lowbit.LARS, Lars, LARS | {"nesterov": True}),
    "CAME": (lowbit.CAME, Came, {"lr": 1e-3, "weight_decay": 0.1}),
    "AdamW factored": (lowbit.AdamW, Factored, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam factored": (lowbit.Adam, Factored, {"lr": 1e-2, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("zero", [False, True], ids=["", "from zero"])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_float64(name, zero):
    make, reference, options = CASES[name]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator) * (0.0 if zero else 0.3)
    p = nn.Parameter(start.clone())
    state_format = FACTORED if "factored" in name else "float32"
    opt = make([p], state_format=state_format, min_numel=0, **options)
    slow = reference(**options, decoupled=make is lowbit.AdamW)
    want = start.double().numpy()
    for t in range(1, 9):
        p.grad = torch.randn(SHAPE, generator=generator) * 10.0 ** (t % 3 - 2)
        slow.t = t
        want = slow.step(want, p.grad.double().numpy())
        opt.step()
        got = p.detach().double().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())
