"""Checkpoints of one file: every dtype, what lowbit-ckpt says of a file,
and a comparison of what torch reads.
"""

import json
import math
import struct

import torch

from tests.support.peers.files import run


def inspect(path, code=0):
    done = run("inspect", path, "--json", "--digest", code=code)
    return json.loads(done.stdout) if code == 0 else done.stderr


def copy(source, target, code=0):
    """The same checkpoint in another container."""
    return run("convert", source, target, code=code)


def same(a, b, where="root"):
    """Equal in types, order, values and bits."""
    if isinstance(a, torch.Tensor):
        assert type(a) is type(b) or {type(a), type(b)} <= {torch.Tensor, torch.nn.Parameter}, where
        if (
            hasattr(a, "dequantize")
            and type(a) is not torch.Tensor
            and type(a) is not torch.nn.Parameter
        ):
            assert a.dtype == b.dtype and a.shape == b.shape, where
            names, meta = a.__tensor_flatten__()
            assert (names, str(meta)) == (
                b.__tensor_flatten__()[0],
                str(b.__tensor_flatten__()[1]),
            ), where
            for name in names:
                same(getattr(a, name), getattr(b, name), f"{where}.{name}")
            return
        assert a.dtype == b.dtype and a.shape == b.shape, where
        x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(x, y), where
    elif isinstance(a, dict):
        assert type(a) is type(b), (where, type(a), type(b))
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b], where
        for k in a:
            same(a[k], b[k], f"{where}.{k}")
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None), where
    elif isinstance(a, (list, tuple)) and type(a) in (list, tuple):
        assert type(a) is type(b) and len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}.{i}")
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), where
    else:
        assert type(a) is type(b) and a == b, (where, a, b)


DTYPES = [
    getattr(torch, name)
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
]


def bits(dtype, *shape, seed=0):
    """A tensor of any dtype; every bit pattern may come, NaN among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (math.prod(shape) * size,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return raw.view(dtype).reshape(shape)
