"""What cannot be stepped is refused at construction: what an optimizer takes, it steps and saves.
Every rule, state format, scale and parameter format.
"""

import warnings

import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from lowbit.optim.named import optimizer_names

pytestmark = pytest.mark.slow

# By their own names; others, such as AdamW8bit, are one of these with a format,
# and MuonWithAdamW two of them.
RULES = [
    name
    for name in optimizer_names()
    if not name.lower().endswith(("8bit", "4bit", "fp8", "withadamw"))
]
OPTIONS = {
    "APOLLO": {"rank": 4},
    "Fira": {"rank": 4},
    "SGD": {"momentum": 0.9},
    "LARS": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
}
MATRIX, EXPERTS = [(16, 48), (64,)], [(3, 8, 33)]


def choices():
    for entry in ops.entries("state"):
        yield MATRIX, {"state_format": entry["name"]}
        for shapes, scales in ((MATRIX, ("row", "column", "tensor")), (EXPERTS, ("rank1",))):
            for scale in scales:
                yield shapes, {"state_format": {"format": entry["name"], "scale": scale}}


def stepped(opt, params):
    for _ in range(2):
        getattr(opt, "train", lambda: None)()
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    getattr(opt, "eval", lambda: None)()
    return opt.state_dict()


@pytest.mark.parametrize("name", RULES)
def test_what_is_taken_is_stepped(name, one_thread):
    taken = refused = 0
    for shapes, choice in choices():
        params = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        options = {**OPTIONS.get(name, {}), **choice}
        if "state_format" in choice:
            options["min_numel"] = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                opt = getattr(lowbit, name)(named, **options)
            except (ValueError, TypeError):
                refused += 1
                continue
            stepped(opt, params)
        taken += 1
    assert taken and refused


@pytest.mark.parametrize("name", RULES)
def test_every_parameter_format_is_stepped(name, one_thread):
    for entry in ops.entries("param"):
        dtype = getattr(torch, entry["dtype"])
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in EXPERTS]
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {**OPTIONS.get(name, {}), "param_format": entry["name"]}
            stepped(getattr(lowbit, name)(named, **options), params)
