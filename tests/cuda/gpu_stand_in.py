"""Tensors that say they are on a GPU and lie in the host's memory, on machines without one: what
operators ask of a tensor's device can be tested, what kernels do cannot. They come as a DLPack
capsule, whose device torch believes."""

import ctypes
from typing import ClassVar

import torch


class _Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_CUDA = 2
_KINDS = {
    **dict.fromkeys((torch.int64, torch.int32), 0),
    torch.uint8: 1,
    **dict.fromkeys((torch.float64, torch.float32, torch.float16), 2),
    torch.bfloat16: 4,
}
_kept: list[object] = []  # what torch points into


def on_gpu(t: torch.Tensor, index: int) -> torch.Tensor:
    """`t`, said to be on cuda:index; the caller must patch torch.cuda._lazy_init where torch is
    built without CUDA.
    """
    lengths = ctypes.c_int64 * max(1, t.dim())
    shape, strides = lengths(*t.shape), lengths(*t.stride())
    said = _Tensor(
        t.data_ptr(),
        _CUDA,
        index,
        t.dim(),
        _KINDS[t.dtype],
        8 * t.element_size(),
        1,
        shape,
        strides,
    )
    _kept.append((t, said, shape, strides))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return torch.utils.dlpack.from_dlpack(make(ctypes.addressof(said), b"dltensor", None))
