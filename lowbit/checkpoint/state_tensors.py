"""What Writer asks of the tensors of a state dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowbit import sharding

# What C++ writes as an item of torch.save; tensors of any other dtype are left to torch.save itself.
DTYPES = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
})  # fmt: skip
# What torch.save writes, and Reader reads.
SAVED = frozenset({torch.float4_e2m1fn_x2} if hasattr(torch, "float4_e2m1fn_x2") else ())


def unread(t: torch.Tensor) -> str:
    """What kind of tensor it is, if Reader does not load it; "" for the others."""
    if type(t) is not torch.Tensor:
        return f"{type(t).__module__}.{type(t).__qualname__}, a subclass of torch.Tensor"
    return "" if t.dtype in DTYPES or t.dtype in SAVED else f"tensor of {t.dtype}"


def check_dense(t: torch.Tensor, name: str) -> None:
    """Raises ValueError for a tensor that has no values to be written one after another."""
    if t.layout != torch.strided:
        raise ValueError(
            f"{name} has the layout {t.layout}: a directory of torch.distributed.checkpoint has only dense tensors. Save its "
            f"indices and values, or to_dense()"
        )
    if t.is_meta:
        raise ValueError(
            f"{name} lies on the meta device and has no values: give it some, by to_empty() and the model's initialization, or leave it out"
        )


def layout(value: Any, name: str = "") -> Any:
    """What must be equal for a copy to take the place of another: names, shapes and dtypes of tensors.

    Raises ValueError for a tensor of the meta device, which cannot be copied.
    """
    if isinstance(value, dict):
        return {key: layout(v, f"{name}.{key}" if name else str(key)) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(v, f"{name}.{i}") for i, v in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_meta:
        check_dense(value, name)
    return (type(value), value.dtype, value.shape, sharding.local(value).shape)


def places(value: Any) -> Iterator[int]:
    """Where the memory of this rank's tensors begins."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from places(v)
    elif isinstance(value, torch.Tensor):
        t = sharding.local(value)
        if type(t) is torch.Tensor and t.layout == torch.strided and t.nbytes:
            yield t.untyped_storage().data_ptr()
