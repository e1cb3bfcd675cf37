"""The parameter formats in torch operations: what `ops.join` and `ops.split` have to give, bit for bit (csrc/core/param)."""

import torch

BIAS = {torch.bfloat16: (127, 7), torch.float16: (15, 10)}  # exponent bias, fraction bits
MOST = {"split8": (127, torch.int8), "split16": (32767, torch.int16)}


def dtype_and_kind(format):
    dtype, _, kind = format.partition("_")
    return getattr(torch, dtype), kind


def _times_power(x, n):
    """x * 2^n in two factors, so that neither leaves float32's range."""
    first = n >> 1

    def power(k):
        return ((k + 127) << 23).to(torch.int32).view(torch.float32)

    return x * power(first) * power(n - first)


def _half_step(stored):
    """log2 of half the distance to the next value away from zero."""
    bias, fraction = BIAS[stored.dtype]
    field = (stored.view(torch.int16).to(torch.int32) & 0x7FFF) >> fraction
    return field.clamp(min=1) - bias - fraction - 1


def join(stored, extra, format):
    """The float32 weight."""
    _, kind = dtype_and_kind(format)
    if kind == "kahan":
        return stored.float() - extra.float()
    if kind in MOST:
        less = (-extra.to(torch.int32)).float() / MOST[kind][0]
        return stored.float() - _times_power(less, _half_step(stored))
    return stored.float()


def split(x, format, *, seed=0, stream=0):
    """The stored parameter and its extra. Formats that draw random bits are not here."""
    dtype, kind = dtype_and_kind(format)
    assert kind in ("", "kahan", *MOST), format
    stored = torch.where(x.isnan(), float("nan"), x).to(dtype)
    if not kind:
        return stored, x.new_empty(0)
    rest = torch.where(stored.isfinite(), x - stored.float(), 0.0)
    if kind == "kahan":
        return stored, torch.where(rest == 0, 0.0, -rest).to(dtype)
    most, integer = MOST[kind]
    scaled = _times_power(rest, -_half_step(stored)).clamp(-1, 1) * most
    return stored, (scaled.sign() * (scaled.abs() + 0.5).floor()).to(integer)
