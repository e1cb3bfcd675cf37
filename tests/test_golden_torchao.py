"""torchao's 4-bit AdamW (tests/golden/README.md); its 8-bit optimizers are in test_golden.py."""

import numpy as np
from peer_golden import AdamTwin, Ours, arrays, blockwise, entries, explain, follow, gradients, near_midpoint, unpack  # fmt: skip

import lowbit

FORMATS = ("dynamic4", "power1_4_unsigned")
NAMES = ("exp_avg", "exp_avg_sq")


def test_torchao_4bit():
    """Blocks of 128 lie within rows of 256: lowbit's own storage is the peer's, but for the order of the two codes of a byte."""
    golden = {k.partition("/")[2]: v for k, v in arrays().items() if k.startswith("ao_AdamW4bit/")}
    tables = [entries(format) for format in FORMATS]
    stores = [blockwise(table, 128, floor=1e-12) for table in tables]
    settings = {"lr": 1e-2}
    twin = AdamTwin(golden["p0"], stores, decay=1e-2, **settings)
    formats = {name: lowbit.scaled(f) for name, f in zip(NAMES, FORMATS, strict=True)}
    ours = Ours(lowbit.AdamW, golden["p0"], weight_decay=1e-2, state_format=formats, **settings)
    slots = list(zip(NAMES, FORMATS, tables, strict=True))
    carried = follow("AdamW4bit", ours, twin, gradients("16x256", 3), slots)

    assert golden["step"] == ours.state["step"] == 3
    np.testing.assert_allclose(twin.p, golden["p3"], rtol=0, atol=5e-7)
    assert np.abs(ours.values - golden["p3"].reshape(-1))[~carried].max() <= 5e-7
    for k, (name, format, table) in enumerate(slots):
        theirs = unpack(golden[f"{name}.codes"], 4, high_first=True)
        reasons = {"midpoint": near_midpoint(twin.stored[k].z, table)}
        explain(f"AdamW4bit {name} (re-derived)", twin.stored[k].codes != theirs, reasons)
        codes = ours.codes(name, format)
        explain(f"AdamW4bit {name}", codes != theirs, reasons | {"carried": carried})
        np.testing.assert_allclose(ours.scale(name, format), golden[f"{name}.scale"], rtol=3e-7)
