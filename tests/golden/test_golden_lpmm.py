"""lpmm's 4-bit AdamW, with blocks of 128 and rank-1 scales, and its 4-bit Factor
(tests/golden/README.md).

The parameter is 41x130, and lpmm's blocks of 128 go over the flattened tensor. Where both moments
are kept in them, the parameter is one row of 5330 here. Where the second moment needs the two
dimensions (rank-1 scales, factors), lowbit keeps the first moment in float32 and the test stores it
after each step as one row, by lowbit's codec.

The packed bytes of the golden arrays come from CPU stand-ins for lpmm's two CUDA functions, so they
show the order of codes in a byte as its source has it.
"""

import functools

import numpy as np

import lowbit
from tests.support.peers.golden import (
    AdamTwin,
    F,
    Ours,
    Stored,
    arrays,
    blockwise,
    encoded,
    entries,
    explain,
    follow,
    gradients,
    middle,
    nearest,
    plain,
    same_values,
    unpack,
)

FIRST, SECOND = "dynamic4", "power1_4_unsigned"
NUMEL = 41 * 130


def golden(case):
    return {k.partition("/")[2]: v for k, v in arrays().items() if k.startswith(f"lpmm_{case}/")}


def group(format):
    return blockwise(entries(format), 128, tie_up=False)


def rank1(x):
    """Over the least of the largest magnitudes of the element's index in each dimension."""
    dims = range(x.ndim)
    most = [np.abs(x).max(axis=tuple(d for d in dims if d != k), keepdims=True) for k in dims]
    least = functools.reduce(np.minimum, most)
    z = x / least
    table = entries(SECOND)
    codes = nearest(z, table, tie_up=False)
    scale = np.concatenate([m.reshape(-1) for m in most])
    return Stored(codes.reshape(-1), scale, z.reshape(-1), table[codes] * least)


def check(case, ours, twin, gone, moments):
    """The golden arrays against both.

    Args:
        gone: of `follow`.
        moments: (name, format, index of the twin's moment, our scales, the golden array's).
    """
    left, (carried, undecided) = golden(case), gone
    assert left["step"] == ours.state["step"] == 3
    same_values(f"{case} (re-derived)", twin.p, left["p3"], undecided)
    same_values(case, ours.values, left["p3"], undecided | carried)
    for name, format, k, scale, golden_scale in moments:
        table = entries(format)
        packed = unpack(left[name], 4)
        assert len(left[name]) == 3 * 1024 + 1  # whole packs of 2048 codes and a byte of nothing
        theirs, filler = packed[:NUMEL], packed[NUMEL : 3 * 2048]
        assert (filler == nearest(np.zeros(1, F), table, tie_up=False)).all()
        np.testing.assert_array_equal(left[f"{name}_qstate.qmap"], table)
        reasons = {"midpoint": middle(table)(twin.stored[k]), "carried": undecided}
        explain(f"{case} {name} (re-derived)", twin.stored[k].codes != theirs, reasons)
        differ = ours.codes(name, format) != theirs
        explain(f"{case} {name}", differ, reasons | {"carried": undecided | carried})
        np.testing.assert_allclose(scale, golden_scale.reshape(-1), rtol=3e-7)


def test_lpmm_groups():
    left = golden("AdamW_group4")
    names = {"exp_avg": FIRST, "exp_avg_sq": SECOND}
    formats = {name: lowbit.scaled(format, block=128) for name, format in names.items()}
    ours = Ours(
        lowbit.AdamW, left["p0"], shape=(1, NUMEL), lr=1e-2, weight_decay=1e-2, state_format=formats
    )
    twin = AdamTwin(left["p0"], [group(FIRST), group(SECOND)], lr=1e-2, decay=1e-2)
    slots = [(name, format, middle(entries(format))) for name, format in names.items()]
    gone = follow("AdamW_group4", ours, twin, gradients("41x130", 3), slots)
    moments = [
        (name, format, k, ours.scale(name, format), left[f"{name}_qstate.overhead.max1"])
        for k, (name, format) in enumerate(names.items())
    ]
    check("AdamW_group4", ours, twin, gone, moments)


def test_lpmm_rank1():
    left = golden("AdamW_rank1")
    formats = {"exp_avg": "float32", "exp_avg_sq": lowbit.scaled(SECOND, scale="rank1")}
    ours = Ours(
        lowbit.AdamW,
        left["p0"],
        outside={"exp_avg": encoded(FIRST, 128)},
        lr=1e-2,
        weight_decay=1e-2,
        state_format=formats,
    )
    twin = AdamTwin(left["p0"], [group(FIRST), rank1], lr=1e-2, decay=1e-2)
    slots = [
        ("exp_avg", FIRST, middle(entries(FIRST))),
        ("exp_avg_sq", SECOND, middle(entries(SECOND))),
    ]
    gone = follow("AdamW_rank1", ours, twin, gradients("41x130", 3), slots)
    name = "exp_avg_sq_qstate.overhead.max_dims"
    most = np.concatenate([left[f"{name}.{d}"].reshape(-1) for d in (0, 1)])
    kept = np.concatenate([ours.scale("exp_avg_sq", SECOND, f"_rank1_{d}") for d in (0, 1)])
    moments = [
        ("exp_avg", FIRST, 0, ours.scale("exp_avg"), left["exp_avg_qstate.overhead.max1"]),
        ("exp_avg_sq", SECOND, 1, kept, most),
    ]
    check("AdamW_rank1", ours, twin, gone, moments)


def test_rank1_of_four_dimensions():
    """The golden arrays have the gradients of such a parameter and no trajectory: against the
    re-derived rule.
    """
    shape = (8, 16, 6, 7)
    p0 = np.resize(golden("AdamW_rank1")["p0"], shape)
    formats = {"exp_avg": "float32", "exp_avg_sq": lowbit.scaled(SECOND, scale="rank1")}
    ours = Ours(lowbit.AdamW, p0, lr=1e-2, weight_decay=1e-2, state_format=formats)
    twin = AdamTwin(p0, [plain, rank1], lr=1e-2, decay=1e-2)
    slots = [("exp_avg", "float32", None), ("exp_avg_sq", SECOND, middle(entries(SECOND)))]
    follow("four dimensions", ours, twin, gradients("8x16x6x7", 3), slots)
    kept = [ours.scale("exp_avg_sq", SECOND, f"_rank1_{d}") for d in range(4)]
    np.testing.assert_allclose(np.concatenate(kept), twin.stored[1].scale, rtol=3e-7)


class FactorTwin(AdamTwin):
    """The second moment is a mean of each row times a mean of each column,
    over the mean of the rows.
    """

    def __init__(self, p0, *args, **settings):
        super().__init__(p0, *args, **settings)
        self.row, self.column = np.zeros(p0.shape[0], F), np.zeros(p0.shape[1], F)

    def moments(self, g):
        m, _ = super().moments(g)
        new = F(1 - self.beta2)
        self.row = F(self.beta2) * self.row + new * (g * g).mean(axis=1)
        self.column = F(self.beta2) * self.column + new * (g * g).mean(axis=0)
        return m, (self.row / self.row.mean())[:, None] * self.column


def test_lpmm_factor():
    left = golden("Factor4")
    ours = Ours(
        lowbit.AdamW,
        left["p0"],
        outside={"exp_avg": encoded(FIRST, 128)},
        lr=1e-2,
        weight_decay=1e-2,
        state_format={"exp_avg": "float32", "exp_avg_sq": "factored"},
    )
    twin = FactorTwin(left["p0"], [group(FIRST), plain], lr=1e-2, decay=1e-2)
    slots = [("exp_avg", FIRST, middle(entries(FIRST))), ("exp_avg_sq", None, None)]
    gone = follow("Factor4", ours, twin, gradients("41x130", 3), slots)
    scale = left["exp_avg_qstate.overhead.max1"]
    check("Factor4", ours, twin, gone, [("exp_avg", FIRST, 0, ours.scale("exp_avg"), scale)])
    for name in ("row", "col"):
        kept = ours.state[f"exp_avg_sq_{name}"].numpy()
        np.testing.assert_allclose(kept, left[f"exp_avg_sq_{name}"], rtol=1e-6)
    # What lpmm would store the whole second moment with: Factor never does.
    np.testing.assert_array_equal(left["exp_avg_sq_qstate.qmap"], entries(SECOND))


def test_factor_as_lowbit_keeps_it_trains_the_same():
    """Blocks within rows of 130 (128 and 2) instead of over the flattened tensor: other scales,
    so near and not equal.
    """
    left = golden("Factor4")
    formats = {"exp_avg": lowbit.scaled(FIRST), "exp_avg_sq": "factored"}
    ours = Ours(lowbit.AdamW, left["p0"], lr=1e-2, weight_decay=1e-2, state_format=formats)
    for g in gradients("41x130", 3):
        ours.step(g)
    moved = np.abs(ours.values - left["p0"].reshape(-1)).mean()
    assert np.abs(ours.values - left["p3"].reshape(-1)).mean() < 0.15 * moved
