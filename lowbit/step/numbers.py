"""Numbers that a step takes as tensors, in the form and on the device that operators want."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import sharding


def capturing(device: torch.device | None = None) -> bool:
    """Whether a CUDA graph is being captured: on the device, or on any (None).

    To ask a GPU that this process has not used would take some hundred megabytes of it.
    """
    cuda = torch.cuda.is_initialized() if device is None else device.type == "cuda"
    return cuda and torch.cuda.is_current_stream_capturing()


def lr_beside(lr: Tensor, device: torch.device) -> Tensor:
    """The learning rate in the operator's form: float32 or float64 on the CPU, float32 on a GPU,
    to which it is moved from another one.

    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would not see what is written to
            a tensor on the CPU.
    """
    away = lr.device.type == "cpu" and device.type != "cpu"
    if away and not torch.compiler.is_compiling() and capturing(device):
        raise RuntimeError(
            "a step that a CUDA graph captures got its learning rate in a tensor on the CPU "
            f"({float(lr)}), which every replay would use again, whatever is written to it; "
            f"make it a tensor on {device}, or a float if it stays as it is"
        )
    if lr.dtype != torch.float32 and (lr.is_cuda or lr.dtype != torch.float64):
        lr = lr.to(torch.float32)
    return lr.to(device) if lr.device.type == device.type else lr


def on_device(number: Tensor | None, device: torch.device) -> Tensor | None:
    """The local part of a one-element tensor, on the device: on a GPU float32 where it is float64.

    A CPU number is filled in on the device, since a copy would wait for it.

    Raises:
        RuntimeError: a CUDA graph is being captured;
            all its replays would use the CPU number of now.
    """
    if number is None:
        return None
    number = sharding.local(number)
    wide = device.type != "cpu" and number.dtype == torch.float64
    dtype = torch.float32 if wide else number.dtype
    if number.device.type == "cpu" != device.type and not torch.compiler.is_compiling():
        if capturing(device):
            raise RuntimeError(
                f"a step that a CUDA graph captures got a number on the CPU ({float(number)}), "
                f"which every replay would use again; pass a tensor on {device}"
            )
        return torch.full((), float(number), dtype=dtype, device=device)
    return number.to(device, dtype)
