"""bitsandbytes' 8-bit optimizers on the CPU (tests/golden/README.md). AdamW8bit: test_golden.py.

Its codes are those of the nearest of 65,536 points and not of the value, so that a hundred elements
go another way with each step. lowbit starts from bitsandbytes' own state after two steps. Its
signed map for every first state is `scaled("dynamic8")`, for Adagrad's sum too, where lowbit would
take an unsigned one. The settings of the golden runs, found by matching them, stand in ONE_STATE.
"""

import numpy as np
import pytest
import torch

import lowbit
from tests.golden.test_golden import Peer, maps, near_lut_edge, nearest_lut  # noqa: F401
from tests.support.peers.golden import F, Ours, arrays, blockwise, explain, gradients, near_midpoint

NAMES = ("exp_avg", "exp_avg_sq")
FORMATS = ("dynamic8", "dynamic8_unsigned")


def check(name, z, table, codes, theirs, *, second=False):
    """Our codes of the third step against the golden ones; z is the peer's."""
    nearer = np.abs(table[codes] - z) <= np.abs(table[theirs] - z)
    reasons = {"midpoint": near_midpoint(z, table)}
    reasons["lut"] = (nearest_lut(z, table) == theirs) & nearer
    if second:
        reasons["zero"] = (theirs == 0) & (codes == 1)
    explain(name, codes != theirs, reasons)


def test_bitsandbytes_lamb_8bit(maps):  # noqa: F811
    """LAMB8bit is its Adam with decoupled decay, without a trust ratio: here lowbit.AdamW.
    lowbit.LAMB, which has the ratio, is another optimizer.
    """
    golden = {k.partition("/")[2]: v for k, v in arrays().items() if "bnbcpu_LAMB8bit/" in k}
    peer = Peer(arrays(), maps, "bnbcpu_LAMB8bit", nearest_lut, True, 0, decay=0.0)
    peer.step(1)
    peer.step(2)
    ours = Ours(lowbit.AdamW, peer.p, lr=1e-2, weight_decay=0.0, state_format="8bit")
    ours.state["step"].fill_(2.0)
    for k, (name, format) in enumerate(zip(NAMES, FORMATS, strict=True)):
        ours.state[f"{name}_{format}"].copy_(torch.tensor(peer.codes[k]))
        ours.state[f"{name}_{format}_scale"].copy_(torch.tensor(peer.scales[k]))
    peer.step(3)
    ours.step(peer.g[2])

    np.testing.assert_allclose(peer.p, golden["p3"], rtol=2e-6, atol=5e-7)
    np.testing.assert_allclose(ours.values, golden["p3"].reshape(-1), rtol=2e-6, atol=5e-7)
    for k, (name, format) in enumerate(zip(NAMES, FORMATS, strict=True)):
        theirs = golden[f"state{k + 1}"].reshape(-1).astype(int)
        z, table = peer.z[k].reshape(-1), peer.map[k]
        explain(
            f"LAMB8bit {name} (re-derived)",
            peer.codes[k].reshape(-1) != theirs,
            {"lut edge": near_lut_edge(z)},
        )
        codes = ours.codes(name, format)
        check(f"LAMB8bit {name}", z, table, codes, theirs, second=k == 1)
        np.testing.assert_allclose(ours.scale(name, format), golden[f"absmax{k + 1}"], rtol=3e-7)
    assert golden["unorm_vec"] == 0  # the room for a trust ratio that the 8-bit step never takes


def sgd(p, s, g, t):
    g = g + F(0.1) * p
    s = g if t == 1 else F(0.9) * s + g
    return p - F(0.01) * s, s


def lion(p, s, g, t):
    p = p * F(1 - 1e-3 * 0.1) - F(1e-3) * np.sign(F(0.9) * s + F(1 - 0.9) * g)
    return p, F(0.99) * s + F(1 - 0.99) * g


def adagrad(p, s, g, t):
    g = g + F(0.1) * p
    s = s + g * g
    return p - F(0.01) * g / (np.sqrt(s) + F(1e-10)), s


ONE_STATE = {
    "SGD8bit": (sgd, lowbit.SGD8bit, "momentum_buffer", {"lr": 1e-2, "momentum": 0.9}),
    "Lion8bit": (lion, lowbit.Lion8bit, "exp_avg", {"lr": 1e-3, "betas": (0.9, 0.99)}),
    "Adagrad8bit": (adagrad, lowbit.Adagrad8bit, "sum", {"lr": 1e-2, "eps": 1e-10}),
}


@pytest.mark.parametrize("name", ONE_STATE)
def test_bitsandbytes_one_state(name, maps):  # noqa: F811
    update, optimizer, state, settings = ONE_STATE[name]
    golden = {k.partition("/")[2]: v for k, v in arrays().items() if f"bnbcpu_{name}/" in k}
    table = maps["dynamic8_signed"]
    store = blockwise(table, 256, pick=lambda z, table, _: nearest_lut(z, table))
    p, kept = golden["p0"], None
    *first, last = gradients("16x256", 3)
    for t, g in enumerate(first, 1):
        p, s = update(p, np.zeros_like(p) if kept is None else kept.value, g, t)
        kept = store(s)
    formats = {state: lowbit.scaled("dynamic8", block=256)}
    ours = Ours(optimizer, p, state_format=formats, weight_decay=0.1, **settings)
    ours.state["step"].fill_(2.0)
    ours.state[f"{state}_dynamic8"].copy_(torch.tensor(kept.codes).reshape(p.shape))
    ours.state[f"{state}_dynamic8_scale"].copy_(torch.tensor(kept.scale).reshape(16, 1))
    p, s = update(p, kept.value, last, 3)
    kept = store(s)
    ours.step(last)

    np.testing.assert_allclose(p, golden["p3"], rtol=0, atol=5e-7)
    np.testing.assert_allclose(ours.values, golden["p3"].reshape(-1), rtol=0, atol=5e-7)
    theirs = golden["state1"].reshape(-1).astype(int)
    edge = {"lut edge": near_lut_edge(kept.z)}
    explain(f"{name} {state} (re-derived)", kept.codes != theirs, edge)
    check(f"{name} {state}", kept.z, table, ours.codes(state, "dynamic8"), theirs)
    np.testing.assert_allclose(ours.scale(state, "dynamic8"), golden["absmax1"], rtol=3e-7)
