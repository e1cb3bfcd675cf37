"""As much of the package `zstandard` as torch's ZStandard extension uses, on the system's libzstd:
frames without a content size, written in pieces, as the package's stream writer leaves them."""

from __future__ import annotations

import ctypes
import ctypes.util
import io
from typing import IO, Any


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("pos", ctypes.c_size_t),
    )


def _library() -> ctypes.CDLL | None:
    for name in ("libzstd.so.1", ctypes.util.find_library("zstd")):
        try:
            lib = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if lib:
            for maker in (lib.ZSTD_createCStream, lib.ZSTD_createDStream):
                maker.restype = ctypes.c_void_p
            pair = [ctypes.POINTER(_Buffer)] * 2
            lib.ZSTD_compressStream2.argtypes = [ctypes.c_void_p, *pair, ctypes.c_int]
            lib.ZSTD_compressStream2.restype = ctypes.c_size_t
            lib.ZSTD_decompressStream.argtypes = [ctypes.c_void_p, *pair]
            lib.ZSTD_decompressStream.restype = ctypes.c_size_t
            lib.ZSTD_isError.argtypes = [ctypes.c_size_t]
            for free in (lib.ZSTD_freeCStream, lib.ZSTD_freeDStream):
                free.argtypes = [ctypes.c_void_p]
            return lib
    return None


_lib: Any = _library()
_ROOM = 1 << 17


def _views(data: bytes, room: Any) -> tuple[_Buffer, _Buffer]:
    source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
    return (
        _Buffer(ctypes.addressof(room), _ROOM, 0),
        _Buffer(source, len(data), 0),
    )


class _Writer(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self.output, self.stream = output, _lib.ZSTD_createCStream()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._feed(bytes(data), 0)
        return len(data)

    def _feed(self, data: bytes, end: int) -> None:
        room = ctypes.create_string_buffer(_ROOM)
        target, source = _views(data, room)
        while True:
            target.pos = 0
            left = _lib.ZSTD_compressStream2(self.stream, target, source, end)
            assert not _lib.ZSTD_isError(left)
            self.output.write(room.raw[: target.pos])
            if source.pos == source.size and (end == 0 or left == 0):
                return

    def close(self) -> None:
        if not self.closed:
            self._feed(b"", 2)  # ZSTD_e_end
            _lib.ZSTD_freeCStream(self.stream)
            super().close()


class ZstdCompressor:
    def stream_writer(self, output: IO[bytes]) -> IO[bytes]:
        return _Writer(output)  # type: ignore[return-value]


class ZstdDecompressor:
    def stream_reader(self, source: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(decompress(source.read()))


def decompress(data: bytes) -> bytes:
    """What one frame holds."""
    stream, made = _lib.ZSTD_createDStream(), bytearray()
    room = ctypes.create_string_buffer(_ROOM)
    target, source = _views(data, room)
    left = 1
    while left and (source.pos < source.size or target.pos == _ROOM):
        target.pos = 0
        left = _lib.ZSTD_decompressStream(stream, target, source)
        assert not _lib.ZSTD_isError(left), "not a zstd frame"
        made += room.raw[: target.pos]
    _lib.ZSTD_freeDStream(stream)
    return bytes(made)


def install() -> bool:
    """Lets torch's extension use it where neither of the packages it looks for is there;
    whether it can be used at all.
    """
    from torch.distributed.checkpoint import _extension

    if _extension.ZStandard.is_available():
        return True
    if _lib is None:
        return False
    import sys

    _extension.zstandard = sys.modules[__name__]
    return True
