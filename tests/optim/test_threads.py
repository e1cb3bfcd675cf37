"""Any number of threads: the same bits, of every optimizer and of what is done without a step.
Elsewhere tests have one thread.
"""

import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from tests.support.configured import OPTIMIZERS
from tests.support.groups import begin, params_for

pytestmark = pytest.mark.slow

COUNTS = (1, 2, 3)
MEASURED = [{"state_format": "lpmm4"}] + [
    {
        "state_format": {
            name: lowbit.scaled("linear8" + end, scale=kind)
            for name, end in (("exp_avg", ""), ("exp_avg_sq", "_unsigned"))
        }
    }
    for kind in ("row", "column", "tensor", "rank1")
]


def with_threads(count, what):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return what()
    finally:
        torch.set_num_threads(before)


def trained(cls, options):
    """Parameters and state after three steps;
    each matrix is more than one thread takes at a time.
    """
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Embedding(301, 320), nn.Linear(640, 256), nn.Conv2d(64, 96, 3)])
    net.to(torch.bfloat16)
    opt = begin(cls(params_for(cls, net), lr=1e-2, **options))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()
    kept = [
        t for p in net.parameters() for t in opt.state[p].values() if isinstance(t, torch.Tensor)
    ]
    return [*(p.detach() for p in net.parameters()), *kept]


@pytest.mark.parametrize(
    "cls, options",
    [(cls, {}) for cls in OPTIMIZERS] + [(lowbit.AdamW, options) for options in MEASURED],
    ids=[cls.__name__ for cls in OPTIMIZERS] + ["lpmm4", "row", "column", "tensor", "rank1"],
)
def test_optimizers(cls, options):
    one, *more = (with_threads(count, lambda: trained(cls, options)) for count in COUNTS)
    for other in more:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_without_a_step():
    x = torch.randn(512, 777, generator=torch.Generator().manual_seed(1))

    def made():
        codes, scales = ops.quantize(x, "dynamic8", 256)
        stored, extra = ops.split(x, "bfloat16_split8")
        p = nn.Parameter(x.clone())
        p.grad = x.clone()
        norm = lowbit.clip_grad_norm_([p], 1.0)
        values = ops.dequantize(codes, scales, "dynamic8", 256, 777)
        return (
            codes,
            scales,
            values,
            stored,
            extra,
            ops.join(stored, extra, "bfloat16_split8"),
            norm,
            p.grad,
        )

    one, *more = (with_threads(count, made) for count in COUNTS)
    for other in more:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
