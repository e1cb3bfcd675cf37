"""Awkward shapes, memory and gradients, for the kinds of state that differ most: each is right, or
one clear error that leaves all as it was.
"""

import functools

import pytest
import torch
from torch import nn

import lowbit

MAKE = {
    name: functools.partial(lowbit.AdamW, state_format=name, min_numel=0)
    for name in (
        "float32",
        "8bit",
        "4bit",
        "3bit",
        "fp8",
        "log8",
        "companded8",
        "factored4",
        "lpmm4",
    )
}
MAKE["Adafactor"] = functools.partial(lowbit.Adafactor, beta1=0.9)
MAKE["CAME"], MAKE["LAMB"] = lowbit.CAME, lowbit.LAMB
MAKE["SGD"] = functools.partial(lowbit.SGD, lr=0.1, momentum=0.9)
MAKE["APOLLO"] = functools.partial(lowbit.APOLLO, rank=4)
SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (0, 40),
    (40, 0),
    (3, 17),
    (5, 33),
    (2, 3, 17),
    (4, 3, 5, 7),
    (1, 16),
    (33, 1),
]


def step(opt, p, grad):
    p.grad = grad
    opt.step()
    return [p.detach().clone(), *(t.clone() for t in opt.state[p].values())]


@pytest.mark.parametrize("name", MAKE)
def test_every_shape_steps(name):
    """Odd rows of packed codes, empty and 0-D parameters: weights stay finite and move;
    a second optimizer does the same.
    """
    for shape in SHAPES:
        torch.manual_seed(0)
        value, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
        p, q = nn.Parameter(value.clone()), nn.Parameter(value.clone())
        a, b = MAKE[name]([p]), MAKE[name]([q])
        for grad in grads:
            ours, again = step(a, p, grad.clone()), step(b, q, grad.clone())
            assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)), shape
        assert p.isfinite().all() and (value.numel() == 0 or not torch.equal(p, value)), shape


@pytest.mark.parametrize("name", MAKE)
def test_memory_layout_does_not_matter(name):
    """Transposed and channels-last parameters,
    strided and expanded gradients: the bits of contiguous ones.
    """
    torch.manual_seed(0)
    conv, matrix = torch.randn(8, 6, 5, 7), torch.randn(40, 48)
    grad4, grad2 = torch.randn(8, 6, 5, 7), torch.randn(40, 1).expand(40, 48)
    layouts = [
        (conv, grad4, conv.clone(memory_format=torch.channels_last), grad4.clone()),
        (conv, grad4, conv.clone(), grad4.clone(memory_format=torch.channels_last)),
        (matrix, grad2.contiguous(), matrix.t().contiguous().t(), grad2.contiguous()),
        (matrix, grad2.contiguous(), matrix.clone(), grad2),
    ]
    for value, grad, odd_value, odd_grad in layouts:
        p, q = nn.Parameter(value.clone()), nn.Parameter(odd_value)
        for w, g, opt in ((p, grad, MAKE[name]([p])), (q, odd_grad, MAKE[name]([q]))):
            for _ in range(2):
                step(opt, w, g)
        assert torch.equal(p, q) and q.stride() == odd_value.stride()


@pytest.mark.parametrize("name", MAKE)
def test_an_expanded_parameter_is_refused_untouched(name):
    """At construction; or before anything is written, where it was not to be trained then."""
    p, q = nn.Parameter(torch.randn(1, 48).expand(40, 48)), nn.Parameter(torch.randn(40, 48))
    with pytest.raises(ValueError, match=r"parameter 1 of shape \(40, 48\) is an expanded view"):
        MAKE[name]([q, p])
    p.requires_grad_(False)
    opt = MAKE[name]([q, p])
    p.requires_grad_(True)
    before = [p.detach().clone(), q.detach().clone(), *(t.clone() for t in opt.state[q].values())]
    p.grad, q.grad = torch.ones(40, 48), torch.ones(40, 48)
    with pytest.raises((ValueError, RuntimeError), match="expanded view"):
        opt.step()
    after = [p, q, *opt.state[q].values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


class OnMps(nn.Parameter):
    """A parameter that says it is on another device than this machine has."""

    device = property(lambda self: torch.device("mps"))


@pytest.mark.parametrize("name", MAKE)
def test_other_devices_are_refused_at_construction(name):
    with pytest.raises(ValueError, match="parameter 'w' is on mps, which lowbit does not support"):
        MAKE[name]([("w", OnMps(torch.randn(64, 64)))])


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e18, 1e38])
def test_gradients_of_any_size(name, size):
    """All zero, denormal and huge: no weight becomes NaN while every square is finite, and zero
    gradients leave it where it was.
    """
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40, 48))
    before = p.detach().clone()
    opt = MAKE[name]([p], weight_decay=0.0)
    for _ in range(3):
        step(opt, p, torch.randn(40, 48).sign() * size)
    if size == 0.0 and name not in ("factored4", "Adafactor", "CAME"):
        assert torch.equal(p, before)
    if size <= 1e18:
        assert p.isfinite().all(), size
    else:
        assert not p.isnan().all() or not torch.tensor(size).square().isfinite()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_stays_where_it_belongs(name, bad):
    """One bad element: another parameter of the same optimizer steps as if it were alone."""
    torch.manual_seed(0)
    grad = torch.randn(40, 48)
    p, q, r = (
        nn.Parameter(torch.randn(40, 48, generator=torch.Generator().manual_seed(1)))
        for _ in range(3)
    )
    both, alone = MAKE[name]([("p", p), ("q", q)]), MAKE[name]([("q", r)])
    broken = grad.clone()
    broken[3, 5] = bad
    p.grad = broken
    step(both, q, grad.clone())
    step(alone, r, grad.clone())
    assert torch.equal(q, r) and q.isfinite().all()
