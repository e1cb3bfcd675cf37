"""Directories of torch.distributed.checkpoint for lowbit-ckpt,
and what it and torch read of them.
"""

import json

import torch
import torch.distributed.checkpoint as dcp

from tests.support.bits import equal
from tests.support.peers.files import run


def inspect(path):
    return json.loads(run("inspect", path, "--json", "--digest").stdout)


def content(seed=0):
    """Every dtype that torch can save, awkward shapes, nested and flat names,
    and values that are not tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(37, 19, generator=generator)
    tensors = {
        str(dtype).removeprefix("torch."): floats.mul(10).to(dtype)
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.uint16,
            torch.uint32,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    }
    shapes = {
        "scalar": torch.tensor(3.5),
        "one": torch.randn(1),
        "empty": torch.empty(0, 5),
        "empty_row": torch.empty(4, 0),
        "thin": torch.randn(3, 1),
        "deep": torch.randn(5, 3, 2, 4),
        "transposed": torch.randn(6, 9).t(),
        "sliced": torch.randn(40, 8)[3:31, ::2],
        "large": torch.randn(1000, 1500),
    }
    return {
        "model": {"layers": [{"weight": t} for t in shapes.values()], **tensors},
        "optim": {
            "state": {"a.b.weight": {"step": torch.tensor(7.0), "exp_avg": torch.randn(8, 8)}},
            "param_groups": [
                {
                    "lr": 0.125,
                    "betas": (0.9, 0.99),
                    "name": "x",
                    "none": None,
                    "flag": True,
                    "params": ["a.b.weight"],
                }
            ],
        },
    }


def saved(path, state=None):
    state = content() if state is None else state
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return equal(a, b)
    return type(a) is type(b) and a == b


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else value


def assert_torch_reads(path, state):
    target = blank(state)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    wanted = dict(leaves(state))
    for key, got in leaves(target):
        assert same(wanted[key], got), key


def small(folder):
    """A folder with a small checkpoint in it, named a."""
    saved(
        folder / "a", {"x": torch.arange(4096.0).reshape(64, 64), "y": torch.arange(10), "lr": 0.5}
    )
    return folder
