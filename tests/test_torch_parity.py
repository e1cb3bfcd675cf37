"""With float32 state every optimizer that torch has takes torch's steps, and goes on from torch's state dict."""

import copy

import pytest
import torch
from torch import nn

import lowbit

SHAPES = [(33, 40), (7,), (4, 3, 5, 5), ()]
STEPS = 50
CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "alpha": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adagrad", {"maximize": True, "eps": 1e-5}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "betas": (0.8, 0.95)}),
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"amsgrad": True, "maximize": True, "eps": 1e-5}),
    ("Adafactor", {}),
    ("Adafactor", {"weight_decay": 0.1, "d": 2.0, "beta2_decay": -0.5, "maximize": True}),
    ("Adafactor", {"lr": 0.05, "eps": (1e-5, 1e-2)}),
]


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def advance(pairs, opts, t):
    for i, pair in enumerate(pairs):
        generator = torch.Generator().manual_seed(1000 * t + i)
        grad = torch.randn(pair[0].shape, generator=generator) * 0.3
        for p in pair:
            p.grad = grad.clone()
    for opt in opts:
        opt.step()


def same(ours, torchs):
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_steps_are_torchs(name, options):
    ours, torchs = params(), params()
    a = getattr(lowbit, name)(ours, state_format="float32", **options)
    b = getattr(torch.optim, name)(torchs, **options)
    for t in range(STEPS):
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_torchs_state_dict_goes_on(name, options):
    """Ten steps by torch, then both: ours from torch's state dict, float32 and with a tensor for a learning rate."""
    torchs = params()
    b = getattr(torch.optim, name)(torchs, **options)
    for t in range(10):
        advance([(p,) for p in torchs], (b,), t)
    ours = [nn.Parameter(p.detach().clone()) for p in torchs]
    a = getattr(lowbit, name)(ours, state_format="float32", **options)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    for group in a.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for t in range(10, 20):
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_arguments_are_torchs(name):
    """Names, order and defaults of what torch takes."""
    import inspect

    skip = {"self", "params"}
    ours = inspect.signature(getattr(lowbit, name).__init__).parameters
    torchs = inspect.signature(getattr(torch.optim, name).__init__).parameters
    positional = [p.name for p in torchs.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p for p in ours][: len(positional)] == positional
    for key, p in torchs.items():
        assert key in skip or (ours[key].default == p.default and ours[key].kind == p.kind), key


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adam", "AdamW", "Adafactor", "Lion", "AdEMAMix", "CAME", "LAMB", "LARS"])  # fmt: skip
def test_8_bit_state_follows_float32_and_resumes(name):
    """The default state comes close to float32's path, and a state dict goes on bit for bit."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator)
    wide, narrow = (nn.Parameter(values.clone()) for _ in range(2))
    extra = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    make = getattr(lowbit, name)
    a, b = make([wide], state_format="float32", **extra), make([narrow], **extra)
    for t in range(20):
        advance([(wide, narrow)], (a, b), t)
    moved = (wide.detach() - values).norm()
    apart = (wide.detach() - narrow.detach()).norm()
    assert apart < 0.25 * moved
    assert (apart == 0) == (name == "Adafactor"), "its means are float32"
    again = nn.Parameter(narrow.detach().clone())
    c = make([again], **extra)
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    for t in range(20, 24):
        advance([(narrow, again)], (b, c), t)
    assert torch.equal(narrow, again)
