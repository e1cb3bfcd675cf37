"""Files as peers wrote them in versions that cannot be installed here, or never could: their
layouts with content of our runs, or with the golden arrays.

What is a peer's own bytes (tests/golden/README.md) says so; the rest is synthesized from the
layouts. Encoders here only have to be exact where a test compares with golden arrays; what a file
means is what tests/support/kinds/decode.py reads in it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.kinds import runs as run
from tests.support.kinds.decode import dynamic8, half_step
from tests.support.peers.files import companded, flash_state, lpmm_config, stand_in_for_yacs
from tests.support.peers.golden import arrays

MAKERS: dict[str, Callable[[pathlib.Path], None]] = {}
CONTENT: dict[str, Callable[[], dict[str, Any]]] = {}
"""What each of MAKERS saves."""


def file_of(name: str, **options: Any) -> Callable[[Callable[[], dict[str, Any]]], Any]:
    """Registers a content that one process saves whole."""

    def register(content: Callable[[], dict[str, Any]]) -> Any:
        CONTENT[name] = functools.cache(content)
        MAKERS[name] = lambda path: torch.save(CONTENT[name](), path)
        return content

    return register


def groups(state: dict[int, Any], net: torch.nn.Module | None = None, **more: Any) -> list[Any]:
    """Two groups, by dimensions, of a net; else one."""
    said = {"lr": run.LR, "betas": run.BETAS, "eps": 1e-8, **more}
    if net is None:
        return [{**said, "weight_decay": run.DECAY, "params": list(state)}]
    first = sum(p.ndim >= 2 for p in net.parameters())
    return [
        {**said, "weight_decay": run.DECAY, "params": list(range(first))},
        {**said, "weight_decay": 0.0, "params": list(range(first, len(state)))},
    ]


# Float32 master weights beside bfloat16 weights


def master_content() -> dict[str, Any]:
    """What trainers with mixed precision keep: the model in bfloat16, its float32 copy by name,
    and the state of that copy.
    """
    return {
        "model": {k: v.bfloat16() for k, v in run.plain_model("adamw").items()},
        "master": run.plain_model("adamw"),
        "optimizer": saved_state("adamw"),
    }


def saved_state(which: str) -> dict[str, Any]:
    """An optimizer's state dict that may be changed: torch's shares each parameter's dict with the
    optimizer.
    """
    saved = run.plain(which)[1].state_dict()
    return {**saved, "state": {i: dict(s) for i, s in saved["state"].items()}}


@file_of("master_file")
def _() -> dict[str, Any]:
    return master_content()


@file_of("master_in_state_file")
def _() -> dict[str, Any]:
    """The copy among the state, by the name that TransformerEngine's FusedAdam gives it."""
    content = master_content()
    net = run.plain("adamw")[0]
    for i, name in enumerate(run.order(net)):
        content["optimizer"]["state"][i]["master_param"] = content["master"][name]
    del content["master"]
    return content


# Tensors that share storage


@file_of("shared_file")
def _() -> dict[str, Any]:
    """Two names of one storage, overlapping views, strides, a gap,
    and every dtype that optimizers or weights come in.
    """
    base = torch.arange(64.0)
    w = run.plain_model("adamw")["body.linear.weight"]
    dtypes = (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.uint32,
    )
    return {
        "model": {
            "tied.in": w,
            "tied.out": w,
            "transposed": w.t(),
            "head": base[:40],
            "tail": base[24:],
            "every.other": base.reshape(8, 8)[::2, 1:7:3],
            "number": torch.tensor(2.5),
            "empty": torch.empty(0, 5),
            "channels_last": torch.arange(120.0)
            .reshape(2, 3, 4, 5)
            .to(memory_format=torch.channels_last),
            **{str(d)[6:]: base[:12].to(d).reshape(3, 4) for d in dtypes},
        },
        "step": 3,
        "said": {"lr": 0.5, "none": None, "flag": True, "name": "x", "betas": (0.9, 0.99)},
    }


# bitsandbytes


@file_of("bnb_plain_file")
def _() -> dict[str, Any]:
    """As up to 0.49.1: what is wrapped now lay beside the step."""
    net, saved = run.plain("bnb")[0], saved_state("bnb")
    state = {
        i: {"step": s["step"], **s["__bnb_optimizer_quant_state__"]}
        for i, s in saved["state"].items()
    }
    return {
        "model": net.state_dict(),
        "optimizer": {"state": state, "param_groups": saved["param_groups"]},
    }


def to_blocks(x: Tensor, qmap: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Nearest codes over the flattened tensor, the last block short, and its maxima."""
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % block)).reshape(-1, block)
    scales = flat.abs().amax(1)
    z = torch.where(scales[:, None] > 0, flat / scales[:, None], 0.0)
    codes = torch.bucketize(z, (qmap[1:] + qmap[:-1]) / 2).to(torch.uint8)
    return codes.reshape(-1)[: x.numel()].reshape(x.shape), scales


@file_of("bnb_2048_file")
def _() -> dict[str, Any]:
    """As before 0.44: blocks of 2048, not wrapped. Synthesized."""
    net = run.plain("adamw")[0]
    state: dict[int, dict[str, Any]] = {}
    for i, (_, s) in enumerate(run.plain_state("adamw").items()):
        state[i] = {"step": 3}
        for number, key, signed in ((1, "exp_avg", True), (2, "exp_avg_sq", False)):
            if s[key].numel() < 4096:
                state[i][f"state{number}"] = s[key]
                continue
            qmap = dynamic8(signed=signed)
            codes, scales = to_blocks(s[key], qmap, 2048)
            state[i] |= {
                f"state{number}": codes,
                f"qmap{number}": qmap,
                f"absmax{number}": scales,
            }
    return {
        "model": net.state_dict(),
        "optimizer": {
            "state": state,
            "param_groups": groups(state, net, alpha=0.0, t_alpha=None, t_beta3=None),
        },
    }


# torchao under its older name

OLD = "torchao.prototype.low_bit_optim"


@contextlib.contextmanager
def prototype_torchao(*, writing: bool) -> Iterator[None]:
    """torchao's state classes under the module they had up to 0.9,
    for pickle to name (`writing`) or find.
    """
    import torchao.optim.subclass_4bit as four
    import torchao.optim.subclass_8bit as eight
    import torchao.optim.subclass_fp8 as fp8

    before = dict(sys.modules)
    classes = [eight.OptimState8bit, four.OptimState4bit, fp8.OptimStateFp8]
    for cls, module in zip(classes, (eight, four, fp8), strict=True):
        name = f"{OLD}.{module.__name__.rpartition('.')[2]}"
        sys.modules.setdefault(OLD, types.ModuleType(OLD))
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], cls.__name__, cls)
        if writing:
            cls.__module__, now = name, cls.__module__
            assert now == module.__name__
    try:
        yield
    finally:
        for cls, module in zip(classes, (eight, four, fp8), strict=True):
            cls.__module__ = module.__name__
        for name in set(sys.modules) - set(before):
            if name.startswith(OLD):
                del sys.modules[name]


def old_torchao(which: str, block: int | None) -> Callable[[pathlib.Path], None]:
    def content() -> dict[str, Any]:
        net, saved = run.plain(f"ao {which}")[0], saved_state(f"ao {which}")
        if block:
            from torchao.optim.subclass_8bit import OptimState8bit

            for s in saved["state"].values():
                for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                    x = s[key].dequantize() if hasattr(s[key], "dequantize") else s[key]
                    if x.numel() >= 4096 and x.numel() % block == 0:
                        s[key] = OptimState8bit.zeros(x.shape, signed, block)
                        s[key].copy_(x)
                    else:
                        s[key] = x
        return {"model": net.state_dict(), "optimizer": saved}

    name = f"torchao_{which}_{block or 'prototype'}_file"
    CONTENT[name] = functools.cache(content)

    def save(path: pathlib.Path) -> None:
        made = CONTENT[name]()
        with prototype_torchao(writing=True):
            torch.save(made, path)

    return save


for which in ("8bit", "4bit", "fp8"):
    MAKERS[f"torchao_{which}_prototype_file"] = old_torchao(which, None)
MAKERS["torchao_8bit_2048_file"] = old_torchao("8bit", 2048)


# FlashOptim


def split(w: Tensor, dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
    """A 16-bit weight and its correction, `bits` of them, as FlashOptim holds them in memory."""
    p = w.to(dtype)
    most = 127 if bits == 8 else 32767
    share = ((w.double() - p.double()) / half_step(p)).clamp(-1, 1).float() * most
    c = share.sign() * (share.abs() + 0.5).floor()
    return p, c.to(torch.int8 if bits == 8 else torch.int16)


def flash_entry(
    m: Tensor, v: Tensor, c: Tensor | None, dtype: torch.dtype, version: str, compress: bool
) -> dict[str, Any]:
    """A parameter's entry of a saved state. What is not compressed is bfloat16 before 0.1.4."""
    new = version == "0.1.4"
    codes = {"exp_avg": companded(m, True), "exp_avg_sq": companded(v, False)}
    if compress:
        entry = flash_state(codes, new=new, bits16=dtype == torch.bfloat16)
    else:
        from tests.support.kinds.decode import dequantize

        entry = flash_state({}, new=new, bits16=False)
        for key, (q, scales) in codes.items():
            kept = {f"{key}::quantized": q, f"{key}::scales": scales}
            value = dequantize("flashoptim", kept, m.shape)[key]
            entry[key] = value if new else value.bfloat16()
    if c is not None:
        # torch's cast on loading keeps a number of one byte, and the bits of two.
        entry["error_bits"] = c.to(dtype) if c.dtype == torch.int8 else c.view(dtype)
    return entry


def flash_content(
    version: str, compress: bool, dtype: torch.dtype = torch.bfloat16, bits: int = 8
) -> dict[str, Any]:
    net = run.plain("adamw")[0]
    model: dict[str, Tensor] = {}
    state: dict[int, Any] = {}
    weights = run.plain_model("adamw")
    for i, (name, s) in enumerate(run.plain_state("adamw").items()):
        w, c = weights[name], None
        if dtype != torch.float32:
            w, c = split(w, dtype, bits)
        model[name] = w
        state[i] = flash_entry(s["exp_avg"], s["exp_avg_sq"], c, dtype, version, compress)
    width = 0 if dtype == torch.float32 else 2 + bits // 8
    more = {"initial_lr": run.LR, "master_bytewidth": width, "quantize": True}
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": groups(state, net, **more)},
    }


FLASH: dict[str, tuple[Any, ...]] = {
    "flashoptim_014_file": ("0.1.4", True),
    "flashoptim_014_plain_file": ("0.1.4", False),
    "flashoptim_013_file": ("0.1.3", False),
    "flashoptim_013_compressed_file": ("0.1.3", True),
    "flashoptim_014_float16_file": ("0.1.4", True, torch.float16),
    "flashoptim_014_float32_file": ("0.1.4", True, torch.float32),
    "flashoptim_014_32bit_file": ("0.1.4", True, torch.bfloat16, 16),
}
for name, said in FLASH.items():
    file_of(name)(functools.partial(flash_content, *said))

EVEN = {"body.linear.weight": (64, 256), "body.conv.weight": (64, 64, 2, 2)}
"""What FlashOptim's groups of 32 cut alike on up to 4 ranks."""


def flash_even(name: str) -> tuple[Tensor, dict[str, Any]]:
    """A weight of EVEN and its entry, whole."""
    m = run.gradient(name, EVEN[name], 0)
    p, c = split(run.normal(name, EVEN[name]) + m * 2.0**-9, torch.bfloat16, 8)
    return p, flash_entry(m, m.square(), c, torch.bfloat16, "0.1.4", True)


@file_of("flashoptim_golden_file")
def _() -> dict[str, Any]:
    """What its own kernels left of AdamW on 70 bfloat16 elements: the golden arrays in the layout
    of 0.1.4.
    """
    left = {
        k: torch.tensor(v.view("i2") if v.dtype == "u2" else v)
        for k, v in arrays("flashoptim_golden").items()
        if "bf16_24_s3" in k
    }
    at = "tr_adamw_bf16_24_s3_"
    entry: dict[str, Any] = {"step": torch.tensor(3)}
    for key in ("exp_avg", "exp_avg_sq"):
        entry[f"{key}::quantized"] = left[f"{at}{key}_codes"]
        entry[f"{key}::scales"] = left[f"{at}{key}_scales_f16bits"].view(torch.bfloat16)
    entry["error_bits"] = left[f"{at}err"].bfloat16()
    more = {"initial_lr": 1e-2, "master_bytewidth": 3, "quantize": True}
    return {
        "model": {"w": left[f"{at}param"].view(torch.bfloat16)},
        "optimizer": {"state": {0: entry}, "param_groups": groups({0: entry}, **more)},
    }


# lpmm


def lpmm_content(case: str, rank1: bool) -> dict[str, Any]:
    """The golden arrays of one parameter, with what its overhead and configuration hold beside
    them, and a small one that stays dense.
    """
    left = {
        k.partition("/")[2]: torch.tensor(v)
        for k, v in arrays().items()
        if k.startswith(f"lpmm_{case}/")
    }
    entry: dict[str, Any] = {"step": left["step"]}
    for key in ("exp_avg", "exp_avg_sq"):
        over: dict[str, Any] = {}
        if key in left:
            entry[key] = left[key]
            at = f"{key}_qstate.overhead."
            over = {"dtype": torch.float32, "stride": (130, 1)}
            if f"{at}max1" in left:
                over |= {"max1": left[f"{at}max1"], "scaled_shape": torch.Size((42, 128))}
            else:
                factors = [left[f"{at}max_dims.{d}"] for d in (0, 1)]
                over |= {
                    "max1": None,
                    "max_dims": factors,
                    "dim": 2,
                    "scaled_shape": torch.Size((41, 130)),
                }
        entry[f"{key}_qstate"] = {
            "enable": True,
            "overhead": over,
            "qmap": left[f"{key}_qstate.qmap"],
        }
    for key in ("exp_avg_sq_row", "exp_avg_sq_col"):
        if key in left:
            entry[key] = left[key]
    small = {k: run.gradient(k, (41,), 0).square() for k in ("exp_avg", "exp_avg_sq")}
    off = {"enable": False, "overhead": {}, "qmap": None}
    state = {
        0: entry,
        1: {"step": left["step"].clone(), **small, **{f"{k}_qstate": dict(off) for k in small}},
    }
    more = {"fused": False, "use_first_moment": True, "factor_second_moment": case == "Factor4"}
    return {"state": state, "param_groups": groups(state, **more), "qconfig": lpmm_config(rank1)}


for name, said in {
    "lpmm_group_file": ("AdamW_group4", False),
    "lpmm_rank1_file": ("AdamW_rank1", True),
    "lpmm_factor_file": ("Factor4", False),
}.items():
    CONTENT[name] = functools.cache(functools.partial(lpmm_content, *said))

    def _save(path: pathlib.Path, name: str = name) -> None:
        stand_in_for_yacs()
        torch.save(CONTENT[name](), path)

    MAKERS[name] = _save


# adafactor-8bit


def log_blocks(v: Tensor, generation: str, block: int = 2048) -> dict[str, Any]:
    """Codes, scales (and minima) of a second moment, padded to whole blocks;
    keys end in these names.
    """
    flat = torch.nn.functional.pad(v.reshape(-1).double(), (0, -v.numel() % block))
    rows = flat.reshape(-1, block)
    log = torch.log2(rows.clamp(min=2.0**-126))
    top = log.amax(1)
    low = None
    if generation == "F0":
        scale = rows.amax(1).clamp(min=1e-12)
        q = (rows / scale[:, None] * 255).round()
    elif generation == "F1":  # its CUDA kernels
        scale = (top.clamp(-126 + 1e-12, 50) + 126) / 255
        q = ((log + 126) / scale[:, None] + 0.5).floor().clamp(0, 255)
    elif generation == "F2":
        scale = top + 126
        q = ((log + 126) * 255 / scale[:, None]).round().clamp(0, 255)
    else:
        steps = 254 if generation == "al8" else 65534
        low = torch.where(rows > 0, log, torch.inf).amin(1).clamp(min=-126)
        top = torch.where(rows > 0, log, -torch.inf).amax(1)
        low = torch.where(low >= top, top - 1, low)
        scale = (top - low).clamp(min=1e-12)
        q = ((log - low[:, None]) * steps / scale[:, None]).round() + 1
        q = torch.where(rows == 0, 0, q.clamp(1, steps + 1))
    full_precision = generation == "al16"
    codes = q.to(torch.int32).to(torch.int16) if full_precision else q.to(torch.uint8)
    made = {
        "q": codes.reshape(-1) if generation in ("F2", "al8") else codes,
        "scale": scale.float(),
        "shape": v.shape,
        "pad": flat.numel() - v.numel(),
    }
    if low is not None:
        made["min_log"] = low.float()
    return made


def uniform(x: Tensor, bits: int, block: int) -> dict[str, Any]:
    """A first moment in even steps: uf4 and uf8."""
    half = 1 << (bits - 1)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % block)).reshape(-1, block)
    most = flat.abs().amax(1).clamp(min=1e-12)
    q = ((flat * half / most[:, None]).round().clamp(-half, half - 1) + half).to(torch.uint8)
    q = q.reshape(-1)
    if bits == 4:
        q = (q[::2] << 4) | q[1::2]
    return {"m_q": q, "m_scale": most, "m_block_size": block}


def table() -> Tensor:
    """A second moment of a parameter of one dimension that is large enough for codes,
    with zeros in it.
    """
    return run.gradient("table", (5000,), 0).square()


def adafactor_content(generation: str) -> dict[str, Any]:
    """Factored state of the net, and a table of one dimension."""
    net = run.plain("adafactor")[0]
    state: dict[int, Any] = {}
    moments = run.plain_state("adamw")
    model = dict(run.plain_model("adafactor"))
    for i, (name, s) in enumerate([*run.plain_state("adafactor").items(), ("table", None)]):
        numel = 5000 if s is None else model[name].numel()
        quantized = numel >= 4096
        entry: dict[str, Any] = {
            "step": 3.0 if generation == "F0" else 3,
            "is_quantized": quantized,
            "block_size": 2048,
        }
        for key, v in ({"variance": table()} if s is None else s).items():
            if key == "step":
                continue
            if quantized:
                blocks = log_blocks(v, generation)
                entry |= {f"{key}_{what}": made for what, made in blocks.items()}
            else:
                entry[key] = v
        if s is not None and quantized and generation in ("F2", "al8"):
            bits, block = (4, 128) if generation == "F2" else (8, 256)
            entry |= uniform(moments[name]["exp_avg"], bits, block)
            if generation != "F2":
                entry |= {"m_quant_type": "uf8", "v_quant_type": generation}
        elif generation in ("al8", "al16") and quantized:
            entry["v_quant_type"] = generation
        state[i] = entry
    model["table"] = torch.zeros(5000)
    said: dict[str, Any] = {
        "lr": 0.01,
        "beta2": None,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": run.DECAY,
        "relative_step": generation != "F0",
        "quantize": True,
        "block_size": 2048,
        "min_8bit_size": 4096,
    }
    if generation in ("F2", "al8", "al16"):
        said["m_block_size"] = 128 if generation == "F2" else 256
    ordered = {**{name: model[name] for name in run.order(net)}, "table": model["table"]}
    saved: dict[str, Any] = {"state": state, "param_groups": [{**said, "params": list(state)}]}
    if generation in ("F2", "al8", "al16"):  # of 0.2.6 and later
        saved |= {"_apollo_seed_counter": 1}
    return {"model": ordered, "optimizer": saved}


for generation in ("F0", "F1", "F2", "al8", "al16"):
    file_of(f"adafactor8bit_{generation.lower()}_file")(
        functools.partial(adafactor_content, generation)
    )


def adafactor_golden(case: str, **said: Any) -> dict[str, Any]:
    """What the peer itself left of one matrix, in its own layout."""
    left = {
        k.partition("/")[2]: torch.tensor(v)
        for k, v in arrays().items()
        if k.startswith(f"{case}/")
    }
    entry: dict[str, Any] = {"step": 3, "is_quantized": True, "block_size": 2048, **said}
    shapes = {"row_var": (96, 1), "col_var": (1, 64), "variance": (96, 64)}
    for key, t in left.items():
        if key.startswith(("p0", "p3")):
            continue
        entry[key] = t
        name = key.removesuffix("_q")
        if name in shapes and key != name:
            entry[f"{name}_shape"] = torch.Size(shapes[name])
            entry[f"{name}_pad"] = t.numel() - math.prod(shapes[name])
    group: dict[str, Any] = {"lr": 1e-3, "block_size": 2048, "quantize": True, "params": [0]}
    return {"model": {"w": left["p3"]}, "optimizer": {"state": {0: entry}, "param_groups": [group]}}


_WIDE = {"m_block_size": 256, "v_quant_type": "al16"}
for name, case, more in (
    ("adafactor8bit_f1_fallback_file", "af019_quant", {}),
    ("adafactor8bit_golden_al8_file", "af046_al8", {"v_quant_type": "al8"}),
    ("adafactor8bit_golden_uf4_file", "af046_adamw_uf4_al16", {**_WIDE, "m_quant_type": "uf4"}),
    ("adafactor8bit_golden_d8_file", "af046_adamw_d8_al16", {**_WIDE, "m_quant_type": "d8"}),
):
    file_of(name)(functools.partial(adafactor_golden, case, **more))
