"""State under scales that are measured over more than a block: of a row, a column, the tensor,
or of rank 1.
"""

import numpy as np
import pytest
import torch

import lowbit
from lowbit import ops
from lowbit.state import quantize as coding
from tests.support.codes import CODED, ONLY, table_of

F = np.float32

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def least_of_maxima(x, scale):
    """The largest magnitude that each value's scale covers, in numpy."""
    a = np.abs(x)
    if scale == "tensor":
        return np.broadcast_to(a.max(), x.shape)
    if scale == "row":
        return np.broadcast_to(
            a.reshape(len(a), -1).max(1).reshape(-1, *[1] * (x.ndim - 1)), x.shape
        )
    if scale == "column":
        return np.broadcast_to(a.max(0), x.shape)
    each = [
        a.max(axis=tuple(i for i in range(x.ndim) if i != d), keepdims=True) for d in range(x.ndim)
    ]
    least = each[0]
    for one in each[1:]:
        least = np.minimum(least, one)
    return np.broadcast_to(least, x.shape)


def by_block(f, x, most):
    """Each value through a block that holds it and what its scale covers: a path that brute force
    has checked.
    """
    pairs = np.zeros((x.size, 32), F)
    pairs[:, 0], pairs[:, 1] = most.reshape(-1), x.reshape(-1)
    codes, scales = ops.quantize(torch.from_numpy(pairs), f["name"], 32)
    return ops.dequantize(codes, scales, f["name"], 32, 32)[:, 1].numpy().reshape(x.shape)


@pytest.mark.parametrize("shape", [(24, 70), (6, 5, 4, 7)], ids=str)
@pytest.mark.parametrize("scale", ["row", "column", "tensor", "rank1"])
def test_measured_scales_are_least_maxima(scale, shape):
    """Two steps of AdamW: what state decodes to equals a numpy reference,
    float32 operation by operation.
    """
    signed = [f for f in CODED if f["cross_tile"] and f["signed"]]
    unsigned = [f for f in CODED if f["cross_tile"] and not f["signed"]]
    if ONLY:
        signed, unsigned = signed or unsigned, unsigned or signed
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(-torch.randint(0, 9, shape, generator=generator).float())
    grads = [torch.randn(shape, generator=generator) * spread for _ in range(2)]
    pairs = [
        (signed[min(i, len(signed) - 1)], unsigned[min(i, len(unsigned) - 1)])
        for i in range(max(len(signed), len(unsigned)))
    ]
    params = [torch.nn.Parameter(torch.zeros(shape)) for _ in pairs]
    groups = []
    for p, (first, second) in zip(params, pairs, strict=True):
        formats = {"exp_avg": lowbit.scaled(first["name"], scale=scale)}
        if not second["signed"] or ONLY:
            formats["exp_avg_sq"] = lowbit.scaled(second["name"], scale=scale)
        groups.append({"params": [p], "state_format": formats})
    opt = lowbit.AdamW(groups, betas=(0.9, 0.99), min_numel=1)
    kept = [[np.zeros(shape, F), np.zeros(shape, F)] for _ in pairs]
    for grad in grads:
        for p in params:
            p.grad = grad.clone()
        opt.step()
        g = grad.numpy()
        for p, pair, values in zip(params, pairs, kept, strict=True):
            m = values[0] + (g - values[0]) * F(1 - 0.9)
            v = values[1] * F(0.99) + (g * g) * F(1 - 0.99)
            lay = opt.layouts[p]
            at = 0
            for k, (f, want) in enumerate(zip(pair, (m, v), strict=True)):
                slot = lay.slots[k]
                assert slot.scale == scale
                n = len(slot.entries(lay.part))
                tensors = [opt.state[p][key] for key in lay.keys[at : at + n]]
                at += n
                got = coding.dequantize_slot(tensors, lay, slot).numpy()
                values[k] = by_block(f, want, least_of_maxima(want, scale))
                np.testing.assert_array_equal(got, values[k], err_msg=f"{f['name']} {scale}")


def test_measured_scales_and_rounding_by_chance():
    """Under cross-tile scales too each value becomes one of its neighbours, and the mean stays."""
    f = next(s for s in CODED if s["cross_tile"] and s["signed"] and s["domain"] == "linear")
    generator = torch.Generator().manual_seed(0)
    row = torch.rand(64, generator=generator)
    shape = (256, 64)
    p = torch.nn.Parameter(torch.zeros(shape))
    formats = {"exp_avg": lowbit.scaled(f["name"], scale="row", rounding="stochastic")}
    opt = lowbit.AdamW([p], betas=(0.0, 0.9), state_format=formats, min_numel=1)
    p.grad = row[None].repeat(256, 1)
    opt.step()
    lay = opt.layouts[p]
    tensors = [opt.state[p][key] for key in lay.keys[:2]]
    got = coding.dequantize_slot(tensors, lay, lay.slots[0]).double()
    gap = float(np.diff(table_of(f)).max()) * float(row.max())
    assert ((got - p.grad).abs() < gap).all()
    assert ((got.mean(0) - p.grad[0]).abs() < 4 * gap / 2 / 16).all()
    assert (got.std(0) > 0).any()
