"""What the tensors of a parameter's state mean,
for every dialect: float32 values under torch's names of the states.

By the peer's own function where it has one and is installed, else by the formula that the peer
decodes with, written out here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops

State = dict[str, Any]


def dequantize(
    dialect: str,
    state: State,
    shape: Sequence[int],
    weight: Tensor | None = None,
    group: State | None = None,
) -> State:
    """Float32 values of one parameter's state, and of its weight as "param" where that is given.

    Args:
        shape: the parameter's.
        weight: the stored parameter; what the state keeps beside it is put together with it.
        group: the parameter's group, where it says how state is kept.
    """
    group = group or {}
    values = _DIALECTS[dialect](
        {**state, **{f"__{k}": v for k, v in group.items()}}, tuple(shape), weight
    )
    values = {k: v for k, v in values.items() if not k.startswith("__")}
    if weight is not None:
        values.setdefault("param", weight)
    return {k: _float(v) for k, v in values.items()}


def _float(v: Any) -> Tensor:
    return torch.as_tensor(v).detach().to(torch.float32)


def _torch(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    return {"param" if k == "master_param" else k: v for k, v in state.items()}


# lowbit

_LONGEST_FIRST = "|".join(sorted(ops.names("state"), key=len, reverse=True))
_CODED = re.compile(f"(.+)_({_LONGEST_FIRST})")


def _lowbit(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    made: State = {}
    cols = math.prod(shape[1:])
    for key, t in state.items():
        slot = _CODED.fullmatch(key)
        if key.startswith("param_"):
            assert key.endswith("_kahan") and weight is not None
            made["param"] = weight.float() - t.float()
        elif slot and ops.state_format(slot[2])["scaled"]:
            block = ops.state_format(slot[2])["block"]
            codes, scales = t.contiguous(), state[f"{key}_scale"].contiguous()
            made[slot[1]] = ops.dequantize(codes, scales, slot[2], block, cols).reshape(shape)
        elif not key.endswith("_scale") and key not in ("stream", "shape"):
            made[slot[1] if slot else key] = t
    return made


# bitsandbytes


def dynamic8(*, signed: bool) -> Tensor:
    """The map of 256 entries that bitsandbytes, torchao, lpmm and adafactor-8bit share."""
    name = "dynamic8" if signed else "dynamic8_unsigned"
    every = torch.arange(256, dtype=torch.uint8).reshape(1, -1)
    return ops.dequantize(every, torch.ones(1, 1), name, 256, 256)[0]


def blockwise(codes: Tensor, qmap: Tensor, scales: Tensor, block: int) -> Tensor:
    """Codes of any shape, in blocks over the flattened tensor, the last one short."""
    flat = codes.reshape(-1)
    return (qmap[flat.long()] * scales.repeat_interleave(block)[: flat.numel()]).reshape(
        codes.shape
    )


def bnb_block(codes: Tensor, scales: Tensor) -> int:
    """The block that explains the number of scales: 256 now, 2048 before 0.44."""
    return next(b for b in (256, 2048) if -(-codes.numel() // b) == scales.numel())


def _bitsandbytes(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    state = {**state, **state.get("__bnb_optimizer_quant_state__", {})}
    made = {"step": state["step"]}
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        codes, scales = state[f"state{number}"], state.get(f"absmax{number}")
        if scales is None:
            made[name] = codes
        else:
            made[name] = blockwise(codes, state[f"qmap{number}"], scales, bnb_block(codes, scales))
    return made


# torchao


def _torchao(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    return {k: v.dequantize() if hasattr(v, "dequantize") else v for k, v in state.items()}


# FlashOptim


def half_step(p: Tensor) -> Tensor:
    """Half of the distance from a 16-bit float to the next one away from zero, in float64."""
    bias, mantissa = (127, 7) if p.dtype == torch.bfloat16 else (15, 10)
    field = (p.view(torch.int16).int() >> mantissa) & (0xFF if mantissa == 7 else 0x1F)
    return torch.exp2((field.clamp(min=1) - bias - mantissa - 1).double())


def _flashoptim(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    made: State = {}
    for key, t in state.items():
        name, _, what = key.partition("::")
        if what == "quantized":
            scales = state[f"{name}::scales"]
            if scales.dtype == torch.bfloat16:  # 0.1.4: bits of a float16
                scales = scales.view(torch.float16)
            each = scales.float().repeat_interleave(32)[: t.numel()].reshape(t.shape)
            n = t.float() / (127 if t.dtype == torch.int8 else 255)
            if t.dtype == torch.int8:
                made[name] = n / (2 - n.abs()) * each
            else:
                made[name] = (n * each).square()
        elif key == "error_bits":
            assert weight is not None
            # One byte was converted to the parameter's type, two were reinterpreted as it.
            full_precision = state["__master_bytewidth"] == 4
            c = t.view(torch.int16).float() if full_precision else t.float()
            # In float32 as its kernels; the step itself may lie below float32's smallest number.
            beyond = ((c / (32767 if full_precision else 127)).double() * half_step(weight)).float()
            made["param"] = weight.float() + beyond
        elif not what and not key.startswith("__"):
            made[key] = t
    return made


# lpmm


def unpacked(codes: Tensor, bits: int = 4, *, high_first: bool = False) -> Tensor:
    """4-bit codes, two of a byte."""
    byte = codes.reshape(-1).view(torch.uint8).int()
    pair = [byte >> 4, byte & 15] if high_first else [byte & 15, byte >> 4]
    return torch.stack(pair, 1).reshape(-1)


def _lpmm(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    made: State = {}
    numel = math.prod(shape)
    for key, t in state.items():
        if key.endswith("_qstate"):
            continue
        said = state.get(f"{key}_qstate", {"enable": False})
        if not said["enable"] or t.dtype != torch.int8:
            made[key] = t
            continue
        over = said["overhead"]
        values = said["qmap"][unpacked(t)[:numel].long()]
        if over.get("max1") is not None:
            scale = over["max1"].reshape(-1).repeat_interleave(128)[:numel]
        else:
            rows, columns = over["max_dims"]
            scale = torch.minimum(rows, columns).expand(shape).reshape(-1)
        made[key] = (values * scale).reshape(shape)
    return made


# adafactor-8bit


def generation(state: State) -> str:
    """F0, F1, F2 or F3, by what each left (formats of 0.1.0, 0.1.3, 0.2.1 and 0.4.0 on)."""
    if any(k.endswith("_min_log") for k in state):
        return "F3"
    if isinstance(state["step"], float):
        return "F0"
    return "F2" if "__m_block_size" in state else "F1"


def _adafactor8bit(state: State, shape: tuple[int, ...], weight: Tensor | None) -> State:
    made: State = {"step": state["step"]}
    which = generation(state)
    for key in ("row_var", "col_var", "variance"):
        if key in state:
            made[key] = state[key]
        elif f"{key}_q" in state:
            q, scale = state[f"{key}_q"].reshape(-1), state[f"{key}_scale"].double()
            if q.dtype == torch.int16:
                q = q.int() & 0xFFFF
            levels = 65534 if state[f"{key}_q"].dtype == torch.int16 else 254
            q = q.double()
            scale = scale.repeat_interleave(state["block_size"])
            if which == "F0":
                value = q * scale / 255
            elif which == "F1":  # as its kernels wrote it; the reader that it shipped divides twice
                value = torch.exp2(q * scale - 126)
            elif which == "F2":
                value = torch.exp2(q * scale / 255 - 126)
            else:
                low = state[f"{key}_min_log"].double().repeat_interleave(state["block_size"])
                value = torch.where(q == 0, 0.0, torch.exp2((q - 1) * scale / levels + low))
            numel = math.prod(state[f"{key}_shape"])
            made[key] = value[:numel].reshape(tuple(state[f"{key}_shape"])).float()
    if "m_q" in state:
        block = state["m_block_size"]
        q = state["m_q"]
        kind = state.get("m_quant_type", "uf4")
        q, half = (unpacked(q, high_first=True), 8) if kind == "uf4" else (q.reshape(-1), 128)
        each = state["m_scale"].repeat_interleave(block)
        if kind == "d8":
            value = dynamic8(signed=True)[q.long()] * each
        else:
            value = (q.float() - half) / half * each
        made["exp_avg"] = value[: math.prod(shape)].reshape(shape)
    return made


_DIALECTS = {
    "torch": _torch,
    "lowbit": _lowbit,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "flashoptim": _flashoptim,
    "lpmm": _lpmm,
    "adafactor8bit": _adafactor8bit,
}
