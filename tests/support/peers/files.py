"""Files as FlashOptim, lpmm and adafactor-8bit write them, put together here: none of the three can
be installed (two need CUDA to be imported at all). Their layouts are written down in the comments
of tools/dialect; their numbers are those of tests/golden, which their own code left."""

import shutil
import subprocess
import sys
import types
from typing import Any

import numpy as np
import torch

from tests.support.require import need

TOOL = shutil.which("lowbit-ckpt") or ""


def need_tool():
    hint = "lowbit-ckpt is not on PATH: run make where its libraries are installed"
    need("ckpt", bool(TOOL), hint, module=True)


def run(*arguments, code=0):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, (
        f"{arguments}: exit {done.returncode}, {done.stdout}{done.stderr}"
    )
    return done


def convert(tmp_path, content, to, *options, code=0, name="out.pt"):
    """What is in the file that `content` becomes, or the message where it is refused."""
    source, target = tmp_path / "in.pt", tmp_path / name
    torch.save(content, source)
    target.unlink(missing_ok=True)
    done = run("convert", source, target, "--to", to, "--quiet", "--force", *options, code=code)
    if code:
        assert not target.exists()
        return done.stderr
    return torch.load(target, weights_only=False)


def content_of(value: Any):
    """A comparable copy: tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, dict):
        return {key: content_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [content_of(item) for item in value]
    return value


def same(a, b):
    a, b = content_of(a), content_of(b)
    assert a == b, (
        _first_difference(a, b) if isinstance(a, dict) and isinstance(b, dict) else (a, b)
    )


def _first_difference(a, b, at=""):
    for key in [*a, *b]:
        if a.get(key) == b.get(key):
            continue
        if isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
            return _first_difference(a[key], b[key], f"{at}.{key}")
        return f"{at}.{key}: {str(a.get(key))[:200]} and {str(b.get(key))[:200]}"


def scaled_normal(shape, seed, size=1e-3):
    """Values over some decades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * size * torch.exp(torch.randn(shape, generator=generator))


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def adam_file(exp_avg, exp_avg_sq, **settings):
    """torch's AdamW after a step of one parameter "w"."""
    state = {"step": torch.tensor(1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    group = {**ADAM, **settings, "params": [0], "param_names": ["w"]}
    return {"state": {0: state}, "param_groups": [group]}


# FlashOptim


def companded(x, is_signed):
    """FlashOptim's codes and float16 scales of the flattened tensor, in numpy's float32."""
    flat = x.numpy().reshape(-1).astype(np.float32)
    blocks = -(-flat.size // 32)
    u = np.zeros(blocks * 32, np.float32)
    u[: flat.size] = flat if is_signed else np.sqrt(flat)
    u = u.reshape(blocks, 32)
    most = np.maximum(np.abs(u).max(axis=1, keepdims=True), np.float32(1e-12))
    z = u / most
    t, top = (2 * z / (1 + np.abs(z)), 127) if is_signed else (z, 255)
    codes = np.floor(t * np.float32(top) + np.float32(0.5)).reshape(-1)[: flat.size]
    codes = codes.astype(np.int8 if is_signed else np.uint8).reshape(x.shape)
    return torch.from_numpy(codes), torch.from_numpy(most[:, 0].astype(np.float16))


def expanded(codes, scales):
    """What they are read as."""
    c = codes.numpy().reshape(-1).astype(np.float32)
    s = np.repeat(scales.numpy().astype(np.float32), 32)[: c.size]
    if codes.dtype == torch.int8:
        t = c / np.float32(127)
        x = t / (2 - np.abs(t)) * s
    else:
        x = (c / np.float32(255) * s) ** 2
    return torch.from_numpy(x.astype(np.float32)).reshape(codes.shape)


def flash_state(moments, *, new, bits16, step=3, error=None):
    """One parameter's entry. `moments`: name -> (codes, float16 scales). `new`: as 0.1.4, which
    counts steps in int64, else as 0.1.3. `bits16`: the weight is bfloat16, and 0.1.4 hides its
    scales in bfloat16 of the same bits.
    """
    entry = {"step": torch.tensor(step, dtype=torch.int64 if new else torch.float32)}
    for name, (codes, scales) in moments.items():
        entry[f"{name}::quantized"] = codes
        entry[f"{name}::scales"] = scales.view(torch.bfloat16) if new and bits16 else scales
    if error is not None:
        entry["error_bits"] = error
    return entry


def flash_file(entries, *, width=3):
    group = {**ADAM, "initial_lr": ADAM["lr"], "master_bytewidth": width, "quantize": True}
    return {
        "state": dict(enumerate(entries)),
        "param_groups": [{**group, "params": list(range(len(entries)))}],
    }


# lpmm


class CfgNode(dict):
    """yacs' node as far as pickles and lpmm's look-ups know it."""

    def __init__(self, entries=(), **more):
        super().__init__(entries, **more)
        self.__dict__.update(
            __immutable__=False,
            __deprecated_keys__=set(),
            __renamed_keys__={},
            __new_allowed__=False,
        )

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def stand_in_for_yacs():
    """Pickles of CfgNode name yacs.config."""
    package, module = types.ModuleType("yacs"), types.ModuleType("yacs.config")
    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    module.CfgNode, package.config = CfgNode, module
    sys.modules.setdefault("yacs", package)
    sys.modules.setdefault("yacs.config", module)


def lpmm_config(rank1=False):
    def quantizer(scale, kind, is_signed):
        return CfgNode(
            ENABLE=True,
            THRESHOLD=4096,
            BITS=4,
            SCALE_TYPE=CfgNode(DEFAULT=scale),
            QUANT_TYPE=CfgNode(DEFAULT=kind),
            ROUND_TYPE="real-nearest",
            GROUP_SIZE=128,
            SIGNED=is_signed,
        )

    second = quantizer("rank1" if rank1 else "group", "power-1", False)
    return CfgNode(QUANT=CfgNode(M=quantizer("group", "nonlinear", True), SQM=second))


def lpmm_qstate(qmap, shape, overhead):
    return {
        "enable": True,
        "overhead": {"dtype": torch.float32, "stride": torch.empty(shape).stride(), **overhead},
        "qmap": torch.as_tensor(qmap),
    }


def lpmm_groups(qmap, shape, most):
    return lpmm_qstate(
        qmap,
        shape,
        {
            "max1": torch.as_tensor(most).reshape(-1, 1),
            "scaled_shape": torch.Size([len(most), 128]),
        },
    )


def lpmm_rank1(qmap, shape, most):
    dims = [torch.as_tensor(m) for m in most]
    return lpmm_qstate(
        qmap,
        shape,
        {"dim": len(shape), "max_dims": dims, "max1": None, "scaled_shape": torch.Size(shape)},
    )


def lpmm_file(entries, config=None):
    group = {**ADAM, "fused": False, "use_first_moment": True, "factor_second_moment": False}
    return {
        "state": dict(enumerate(entries)),
        "param_groups": [{**group, "params": list(range(len(entries)))}],
        "qconfig": config or lpmm_config(),
    }


# adafactor-8bit


def adafactor_file(entries, top=None, **settings):
    group = {
        "lr": 1e-2,
        "beta2": None,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": 0.0,
        "relative_step": True,
        "scale_parameter": True,
        "quantize": True,
        "block_size": 2048,
        "min_8bit_size": 4096,
        **settings,
    }
    return {
        "state": dict(enumerate(entries)),
        "param_groups": [{**group, "params": list(range(len(entries)))}],
        **(top or {}),
    }
