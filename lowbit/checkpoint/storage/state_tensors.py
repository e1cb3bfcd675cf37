"""What Writer asks of the tensors of a state dict."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch

from lowbit import sharding
from lowbit.checkpoint.native import native

# What C++ writes as an item of torch.save;
# tensors of any other dtype are left to torch.save itself.
DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)
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
            f"{name} has the layout {t.layout}: a directory of torch.distributed.checkpoint has "
            "only dense tensors. Save its indices and values, or to_dense()"
        )
    if t.is_meta:
        raise ValueError(
            f"{name} lies on the meta device and has no values: give it some, by to_empty() and "
            "the model's initialization, or leave it out"
        )


def check_values(value: Any, name: str = "") -> None:
    """Raises ValueError for a tensor of the meta device, which cannot be copied, by its name."""
    if isinstance(value, dict):
        for key, v in value.items():
            check_values(v, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            check_values(v, f"{name}.{i}")
    elif isinstance(value, torch.Tensor) and value.is_meta:
        check_dense(value, name)


@torch.no_grad()
def with_own_memory(made: Any, value: Any) -> Any:
    """torch takes a DTensor without dimensions as its own host copy, and a step that counts on
    would change it: here it gets memory of its own.
    """
    if isinstance(value, dict):
        return {key: with_own_memory(made[key], v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_own_memory(m, v) for m, v in zip(made, value, strict=True)]
    if made is not value or not isinstance(value, torch.Tensor):
        return made
    return copy.deepcopy(value) if value.device.type == "cpu" else value.to("cpu")


class OtherLayout(Exception):
    """Names, shapes or dtypes of tensors are not those of the host copy."""


@torch.no_grad()
def copied_into(kept: Any, value: Any) -> Any:
    """The value with its tensors' values in the tensors of `kept`;
    what else it holds is copied as torch does.

    Raises OtherLayout, and has copied nothing, if `kept` is not of the same names,
    shapes and dtypes.
    """
    to: list[torch.Tensor] = []
    what: list[torch.Tensor] = []
    out = _with_tensors_of(kept, value, to, what)
    plain: list[tuple[int, int, int]] = []
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for a, b in zip(to, what, strict=True):
        if _is_plain(a) and _is_plain(b):
            plain.append((a.data_ptr(), b.data_ptr(), a.nbytes))
        else:
            others.append((a, b))
    native().copy_memory(plain, torch.get_num_threads())
    if others and all(type(b) in (torch.Tensor, torch.nn.Parameter) for _, b in others):
        torch._foreach_copy_([a for a, _ in others], [b for _, b in others])
        return out
    for a, b in others:
        a.copy_(b)
    return out


def _is_plain(t: torch.Tensor) -> bool:
    """Whether its values are the bytes that it has in the host's memory, one after another."""
    return (
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout == torch.strided
        and not t.is_quantized
        and t.is_cpu
        and t.is_contiguous()
        and not (t.is_neg() or t.is_conj())
    )


def _with_tensors_of(
    kept: Any, value: Any, to: list[torch.Tensor], what: list[torch.Tensor]
) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(kept, torch.Tensor) or value.is_meta or kept.shape != value.shape:
            raise OtherLayout
        mine, theirs = _memory(kept), _memory(value)
        if len(mine) != len(theirs) or not sharding.same_placement(kept, value):
            raise OtherLayout
        for a, b in zip(mine, theirs, strict=True):
            if a.dtype != b.dtype or a.shape != b.shape:
                raise OtherLayout
        to += mine
        what += theirs
        return kept
    if isinstance(value, dict):
        if not isinstance(kept, dict) or kept.keys() != value.keys():
            raise OtherLayout
        return {key: _with_tensors_of(kept[key], v, to, what) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        if not isinstance(kept, (list, tuple)) or len(kept) != len(value):
            raise OtherLayout
        made = [_with_tensors_of(k, v, to, what) for k, v in zip(kept, value, strict=True)]
        return tuple(made) if isinstance(value, tuple) else made
    if value is None or isinstance(value, (int, float, str, bytes, io.BytesIO)):
        return value
    return copy.deepcopy(value)


def _memory(t: Any) -> list[torch.Tensor]:
    """This rank's tensors of it: of a ShardedTensor there may be several."""
    if hasattr(t, "local_shards"):
        return [shard.tensor for shard in t.local_shards()]
    return [sharding.local(t)]


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
