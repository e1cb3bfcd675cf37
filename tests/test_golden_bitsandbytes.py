"""bitsandbytes' 8-bit LAMB on the CPU, which is its Adam with decoupled decay and no trust ratio (tests/golden/README.md). AdamW8bit: test_golden.py."""

import numpy as np
import torch
from peer_golden import Ours, arrays, explain, near_midpoint
from test_golden import Peer, maps, near_lut_edge, nearest_lut  # noqa: F401

import lowbit

NAMES = ("exp_avg", "exp_avg_sq")
FORMATS = ("dynamic8", "dynamic8_unsigned")


def test_bitsandbytes_lamb_8bit(maps):  # noqa: F811
    """lowbit.AdamW without decay, from bitsandbytes' own state after two steps: its codes are those of the nearest of 65,536 points and not of the
    value, so that a hundred elements go another way with each step. lowbit.LAMB, which has the trust ratio, is another optimizer."""
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
        explain(f"LAMB8bit {name} (re-derived)", peer.codes[k].reshape(-1) != theirs, {"lut edge": near_lut_edge(z)})  # fmt: skip
        codes = ours.codes(name, format)
        nearer = np.abs(table[codes] - z) <= np.abs(table[theirs] - z)
        reasons = {"midpoint": near_midpoint(z, table)}
        reasons["lut"] = (nearest_lut(z, table) == theirs) & nearer
        if k == 1:
            reasons["zero"] = (theirs == 0) & (codes == 1)
        explain(f"LAMB8bit {name}", codes != theirs, reasons)
        np.testing.assert_allclose(ours.scale(name, format), golden[f"absmax{k + 1}"], rtol=3e-7)
    assert golden["unorm_vec"] == 0  # the room for a trust ratio that the 8-bit step never takes
