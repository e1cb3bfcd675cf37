"""What torch.compile and fake tensors take for the results of the operators: shapes and dtypes
without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def register(
    entries: Callable[[str], Sequence[Mapping[str, Any]]], power_words: Callable[[], int]
) -> None:
    """Registers them for the operators that are loaded.

    Args:
        entries: the catalog's of a kind, `ops.entries`; operators take numbers of them.
        power_words: the length of what `ops.exact_powers` returns.
    """

    def fake(name: str, of: Callable[..., Any]) -> None:
        def checked(*given: Any, **options: Any) -> Any:
            _check_devices(name, [*given, *options.values()])
            return of(*given, **options)

        torch.library.register_fake(f"lowbit::{name}", checked)

    def state_codes(x: Tensor, entry: Mapping[str, Any]) -> Tensor:
        rows, cols = x.shape
        dtype = getattr(torch, entry["dtype"])
        return x.new_empty((rows, -(-cols * entry["bits"] // 8)), dtype=dtype)

    def quantize(x: Tensor, format: int, block: int) -> tuple[Tensor, Tensor]:
        entry = entries("state")[format]
        width = -(-x.shape[1] // block) * entry["scale_numbers"]
        scales = x.new_empty((x.shape[0], width), dtype=getattr(torch, entry["scale_dtype"]))
        return state_codes(x, entry), scales

    def dequantize(codes: Tensor, scales: Tensor, format: int, block: int, cols: int) -> Tensor:
        return codes.new_empty((codes.shape[0], cols), dtype=torch.float32)

    def split(x: Tensor, format: int, seed: int, stream: int) -> tuple[Tensor, Tensor]:
        entry = entries("param")[format]
        stored = torch.empty_like(x, dtype=getattr(torch, entry["dtype"]))
        if not entry["compensation"]:
            return stored, x.new_empty((0,), dtype=torch.uint8)
        dtype = getattr(torch, entry["compensation"])
        size = (*x.shape, entry["compensation_bytes"]) if dtype == torch.uint8 else x.shape
        return stored, x.new_empty(size, dtype=dtype)

    fake("step", lambda *_, **__: None)
    fake("accumulate", lambda *_: None)
    fake("mean_add", lambda *_: None)
    fake("mean_of", lambda *_: None)
    fake(
        "exact_powers", lambda grads, power: grads[0].new_empty((power_words(),), dtype=torch.int64)
    )
    fake(
        "allocate",
        lambda size, dtype, device, memory: torch.empty(
            size, dtype=getattr(torch, dtype), device=torch.device("cuda", device)
        ),
    )
    fake("quantize", quantize)
    fake("dequantize", dequantize)
    fake("quantize_given", lambda x, absmax, format: state_codes(x, entries("state")[format]))
    fake("dequantize_given", lambda codes, absmax, format: torch.empty_like(absmax))
    fake("join", lambda stored, compensation, format: torch.empty_like(stored, dtype=torch.float32))
    fake("split", split)
    fake("newton_schulz", lambda *_: None)
    fake("normalize_rows", lambda *_: None)
    fake(
        "bfloat16_product",
        lambda a, b: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32),
    )


def _check_devices(name: str, given: Sequence[Any]) -> None:
    """Raises RuntimeError if some tensors are on the meta device and others are not: torch runs
    the fake kernel if any tensor is on meta, so the result would have no values.
    """
    devices = {
        t.device.type
        for each in given
        for t in (each if isinstance(each, (list, tuple)) else [each])
        if isinstance(t, Tensor)
    }
    if "meta" in devices and len(devices) > 1:
        others = " and ".join(sorted(devices - {"meta"}))
        raise RuntimeError(
            f"lowbit::{name}: some tensors are on the meta device, which holds no values, and "
            f"others on {others}; put them all on one device"
        )
