"""Trajectories that torchao and bitsandbytes left (tests/golden), held against ours.

Each peer is first re-derived here in numpy, step by step, and must meet its own golden bits: so
what we call the peer's rule is the peer's rule. Then lowbit runs from the same inputs. Codes may
differ only where the test can name the reason, and it prints those places:

* zero rule: the peer stores a small positive second moment as zero, lowbit as the smallest step
  (docs/definitions/formats.md#dynamic8);
* midpoint: the value lies within 2 units in the last place of the middle between two codes, and the
  peer's arithmetic rounds differently;
* lut: bitsandbytes' CPU code rounds the value to one of 65,536 points before it looks for the
  nearest code.
"""

import json

import numpy as np
import pytest
import torch

from lowbit import ops
from tests.support.paths import GOLDEN
from tests.support.peers.golden import explain, near_midpoint
from tests.support.plans import plan_row

F = np.float32
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 1e-2


@pytest.fixture(scope="module")
def arrays():
    return np.load(GOLDEN / "peers8bit.npz")


@pytest.fixture(scope="module")
def maps():
    data = json.loads((GOLDEN / "dynamic8_maps.json").read_text())
    return {
        name: np.array([int(h, 16) for h in entry["float32_hex"]], dtype=np.uint32).view(F)
        for name, entry in data.items()
    }


def nearest(z, table):
    """The index of the entry nearest to z, the higher one on a tie: torchao's rule. z [...],
    float32.
    """
    low = np.clip(np.searchsorted(table, z, side="right") - 1, 0, 254)
    return np.where(z - table[low] >= F(0.5) * (table[low + 1] - table[low]), low + 1, low)


def nearest_lut(z, table):
    """bitsandbytes' CPU rule: the nearest of 65,536 even points of [-1, 1] first,
    then the nearest code to it.
    """
    j = np.floor((np.clip(z, -1, 1) + F(1)) / F(2) * F(65535) + F(0.5))
    point = (-1.0 + 2.0 * j.astype(np.float64) / 65535.0).astype(F)
    middles = (table[1:].astype(np.float64) + table[:-1]) / 2
    return np.searchsorted(middles, point.astype(np.float64), side="left")


class Peer:
    """A peer's 8-bit Adam in float32 numpy, one block of 256 for each row."""

    def __init__(self, arrays, maps, prefix, code, decoupled, floor, decay=DECAY):
        self.g = [arrays[f"g{t}_16x256"] for t in (1, 2, 3)]
        self.p = arrays[prefix + "/p0"].copy()
        self.map = (maps["dynamic8_signed"], maps["dynamic8_unsigned"])
        self.code, self.decoupled, self.floor, self.decay = code, decoupled, F(floor), decay
        self.codes = [np.zeros((16, 256), np.int64)] * 2
        self.scales = [np.zeros((16, 1), F)] * 2
        self.z = [None, None]
        self.seen_zero = np.zeros((16, 256), bool)  # a positive second moment was stored as zero

    def step(self, t):
        m, v = (self.map[k][self.codes[k]] * self.scales[k] for k in (0, 1))
        g = self.g[t - 1]
        if self.decoupled:
            self.p = self.p - F(LR * self.decay) * self.p
        else:
            g = g + F(self.decay) * self.p
        m = m + F(1 - BETA1) * (g - m)
        v = v + F(1 - BETA2) * (g * g - v)
        for k, x in enumerate((m, v)):
            self.scales[k] = np.maximum(np.abs(x).max(axis=1, keepdims=True), self.floor)
            self.z[k] = x / self.scales[k]
            self.codes[k] = self.code(self.z[k], self.map[k])
        self.seen_zero |= (self.codes[1] == 0) & (v > 0)
        c1, c2 = 1 - BETA1**t, 1 - BETA2**t
        self.p = self.p - F(LR) * (m / F(c1)) / (np.sqrt(v) / F(c2**0.5) + F(EPS))


def ours(rule, p0, grads, state=None, first=1):
    """lowbit from p0 through grads; returns p, [codes, scales, codes, scales]."""
    p = torch.tensor(p0.copy())
    plan = plan_row(16, 256, ["dynamic8", "dynamic8_unsigned"])
    if state is None:
        zeros = (torch.zeros(16, 1), torch.zeros((16, 256), dtype=torch.uint8), torch.zeros(16, 1))
        state = [torch.full((16, 256), 127, dtype=torch.uint8), *zeros]
    steps = [torch.tensor(float(first - 1))]
    for g in grads:
        ops.step(rule, [p], [torch.tensor(g)], state, steps, plan, [LR, BETA1, BETA2, EPS, DECAY])
    return p.numpy(), [s.numpy() for s in state]


@pytest.mark.parametrize("cls, rule", [("AdamW8bit", "adamw"), ("Adam8bit", "adam")])
def test_torchao_8bit(arrays, maps, cls, rule):
    prefix = f"ao_{cls}"
    peer = Peer(arrays, maps, prefix, nearest, rule == "adamw", 1e-12)
    stored_zero_before_last = None
    for t in (1, 2, 3):
        stored_zero_before_last = peer.seen_zero.copy()
        peer.step(t)
    names = ("exp_avg", "exp_avg_sq")
    for k, name in enumerate(names):
        differ = peer.codes[k] != arrays[f"{prefix}/{name}.codes"]
        midpoint = near_midpoint(peer.z[k], peer.map[k])
        explain(f"{cls} {name} (re-derived)", differ, {"midpoint": midpoint})
    # where the peer divided by eps alone its parameter is noise, here and there
    settled = ~stored_zero_before_last
    atol = 1e-6 if rule == "adamw" else 1e-5  # L2 decay feeds rounding of the parameter back into v
    golden_p = arrays[prefix + "/p3"]
    np.testing.assert_allclose(peer.p[settled], golden_p[settled], rtol=2e-6, atol=atol)

    p, state = ours(rule, arrays[prefix + "/p0"], peer.g)
    np.testing.assert_allclose(p[settled], golden_p[settled], rtol=2e-6, atol=atol)
    for k, name in enumerate(names):
        codes, golden = state[2 * k].astype(np.int64), arrays[f"{prefix}/{name}.codes"]
        # A row's largest may be where the zero rule moved p.
        scale_rtol = 3e-7 if rule == "adamw" else 3e-4
        golden_scale = arrays[f"{prefix}/{name}.scale"]
        np.testing.assert_allclose(state[2 * k + 1][:, 0], golden_scale, rtol=scale_rtol)
        reasons = {"midpoint": near_midpoint(peer.z[k], peer.map[k])}
        if k == 1:
            reasons["zero"] = peer.seen_zero & (codes >= 1)
            if rule == "adam":
                reasons["scale"] = np.broadcast_to(state[3] != golden_scale[:, None], codes.shape)
        elif rule == "adam":  # L2 decay feeds the moved parameter back, and its row's scale with it
            reasons["zero"] = np.broadcast_to(state[1] != golden_scale[:, None], codes.shape)
        explain(f"{cls} {name}", codes != golden, reasons)
        if rule == "adam":
            assert (codes != golden).mean() < 0.002 and np.abs(codes - golden).max() <= 1
    assert (state[2][peer.z[1] > 0] >= 1).all(), "a positive second moment was stored as zero"


def test_bitsandbytes_8bit(arrays, maps):
    prefix = "bnbcpu_AdamW8bit"
    peer = Peer(arrays, maps, prefix, nearest_lut, True, 0)
    peer.step(1)
    peer.step(2)
    before = peer.p.copy(), [c.copy() for c in peer.codes], [s.copy() for s in peer.scales]
    peer.step(3)
    for k, name in enumerate(("state1", "state2")):
        differ = peer.codes[k] != arrays[f"{prefix}/{name}"]
        explain(f"{name} (re-derived)", differ, {"lut edge": near_lut_edge(peer.z[k])})
    np.testing.assert_allclose(peer.p, arrays[prefix + "/p3"], rtol=2e-6, atol=5e-7)

    # From bitsandbytes' own state after two steps: the same update,
    # then the nearest code instead of the LUT's.
    p, codes, scales = before
    state = [torch.tensor(x) for k in (0, 1) for x in (codes[k].astype(np.uint8), scales[k])]
    p, state = ours("adamw", p, peer.g[2:], state, first=3)
    np.testing.assert_allclose(p, arrays[prefix + "/p3"], rtol=2e-6, atol=5e-7)
    for k, name in enumerate(("state1", "state2")):
        golden, codes = arrays[f"{prefix}/{name}"].astype(np.int64), state[2 * k].astype(np.int64)
        np.testing.assert_allclose(
            state[2 * k + 1][:, 0], arrays[f"{prefix}/absmax{k + 1}"], rtol=3e-7
        )
        z, table = peer.z[k], peer.map[k]
        lut = (nearest_lut(z, table) == golden) & (
            np.abs(table[codes] - z) <= np.abs(table[golden] - z)
        )
        reasons = {"midpoint": near_midpoint(z, table), "lut": lut}
        reasons["zero"] = (golden == 0) & (codes == 1) if k == 1 else np.zeros_like(lut)
        explain(name, codes != golden, reasons)


def near_lut_edge(z):
    """Where the LUT's own index is within float error of changing."""
    j = (np.clip(z, -1, 1) + F(1)) / F(2) * F(65535) + F(0.5)
    return np.abs(j - np.round(j)) < 0.02
