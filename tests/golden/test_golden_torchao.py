"""torchao's 4-bit AdamW (tests/golden/README.md); its 8-bit optimizers are in test_golden.py."""

import numpy as np

import lowbit
from tests.support.peers.golden import (
    AdamTwin,
    Ours,
    arrays,
    blockwise,
    entries,
    explain,
    follow,
    gradients,
    middle,
    same_values,
    unpack,
)

FORMATS = ("dynamic4", "power1_4_unsigned")
NAMES = ("exp_avg", "exp_avg_sq")


def test_torchao_4bit():
    """Blocks of 128 lie within rows of 256: lowbit's own storage is the peer's, but for the order
    of the two codes of a byte.
    """
    golden = {k.partition("/")[2]: v for k, v in arrays().items() if k.startswith("ao_AdamW4bit/")}
    tables = [entries(format) for format in FORMATS]
    stores = [blockwise(table, 128, floor=1e-12) for table in tables]
    twin = AdamTwin(golden["p0"], stores, lr=1e-2, decay=1e-2)
    formats = {name: lowbit.scaled(f) for name, f in zip(NAMES, FORMATS, strict=True)}
    ours = Ours(lowbit.AdamW, golden["p0"], lr=1e-2, weight_decay=1e-2, state_format=formats)
    slots = list(zip(NAMES, FORMATS, map(middle, tables), strict=True))
    carried, undecided = follow("AdamW4bit", ours, twin, gradients("16x256", 3), slots)

    assert golden["step"] == ours.state["step"] == 3
    same_values("AdamW4bit (re-derived)", twin.p, golden["p3"], undecided)
    same_values("AdamW4bit", ours.values, golden["p3"], undecided | carried)
    for k, (name, format, near) in enumerate(slots):
        theirs = unpack(golden[f"{name}.codes"], 4, high_first=True)
        reasons = {"midpoint": near(twin.stored[k]), "carried": undecided}
        explain(f"AdamW4bit {name} (re-derived)", twin.stored[k].codes != theirs, reasons)
        codes = ours.codes(name, format)
        explain(f"AdamW4bit {name}", codes != theirs, reasons | {"carried": undecided | carried})
        np.testing.assert_allclose(ours.scale(name, format), golden[f"{name}.scale"], rtol=3e-7)
