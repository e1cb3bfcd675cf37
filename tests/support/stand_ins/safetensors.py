"""safetensors files by the package where it is installed,
else by these lines after its format: the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch
from torch import Tensor

# The package sorts by dtype, the last of these first, then by name.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


def save_file(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    try:
        from safetensors.torch import save_file as theirs
    except ImportError:
        pass
    else:
        theirs(dict(tensors), os.fspath(path), metadata=dict(metadata or {}))
        return
    rank = list(_DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (-rank.index(item[1].dtype), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, t in ordered:
        end = at + t.numel() * t.element_size()
        header[name] = {
            "dtype": _DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, t in ordered:
            file.write(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def load_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file as theirs
    except ImportError:
        pass
    else:
        return theirs(os.fspath(path))
    with open(path, "rb") as file:
        data = file.read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    made = {}
    for name, entry in header.items():
        begin, end = (8 + size + o for o in entry["data_offsets"])
        made[name] = (
            torch.frombuffer(bytearray(data[begin:end]), dtype=dtypes[entry["dtype"]])
            if end > begin
            else torch.empty(0, dtype=dtypes[entry["dtype"]])
        ).reshape(entry["shape"])
    return made
