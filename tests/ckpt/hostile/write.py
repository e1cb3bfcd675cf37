"""Bytes of checkpoints by hand: pickles, zip archives and items of torch.save.
Everything in them can be made to lie.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

U16, U32, U64 = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
P2, P4 = b"\x80\x02", b"\x80\x04"


def le(width: int, value: int) -> bytes:
    """A little-endian number; cut to its width, so that it can lie."""
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


# Pickles, without a memo: every object is written where it stands.


class Raw(bytes):
    """Opcodes that leave one value on the stack."""


def string(text: str | bytes) -> bytes:
    body = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return b"X" + le(4, len(body)) + body


def integer(n: int) -> bytes:
    if 0 <= n < 256:
        return b"K" + le(1, n)
    if -(2**31) <= n < 2**31:
        return b"J" + le(4, n)
    width = (n.bit_length() + 8) // 8
    return b"\x8a" + le(1, width) + n.to_bytes(width, "little", signed=True)


def dump(value: object) -> bytes:
    """The opcodes of plain data with `Raw` inside."""
    if isinstance(value, Raw):
        return bytes(value)
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, (str, bytes)):
        return string(value)
    if isinstance(value, tuple):
        return b"(" + b"".join(map(dump, value)) + b"t" if value else b")"
    if isinstance(value, list):
        return b"](" + b"".join(map(dump, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(dump(k) + dump(v) for k, v in value.items()) + b"u"
    if isinstance(value, Pairs):
        return b"}(" + b"".join(dump(k) + dump(v) for k, v in value.items) + b"u"
    raise TypeError(type(value))


@dataclass
class Pairs:
    """A dict that may have a key twice."""

    items: list[tuple[object, object]]


def glob(module: str, name: str) -> Raw:
    return Raw(b"c" + module.encode() + b"\n" + name.encode() + b"\n")


def reduce(function: Raw, *arguments: object) -> Raw:
    return Raw(function + dump(tuple(arguments)) + b"R")


def build(cls: Raw, state: object) -> Raw:
    return Raw(cls + b")\x81" + dump(state) + b"b")


def persistent(value: object) -> Raw:
    return Raw(dump(value) + b"Q")


# Tensors.

STORAGE = {
    "float32": ("FloatStorage", 4),
    "float64": ("DoubleStorage", 8),
    "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2),
    "uint8": ("ByteStorage", 1),
    "int64": ("LongStorage", 8),
    "bool": ("BoolStorage", 1),
}


def count(shape: Iterable[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def tensor(
    shape: object,
    key: object = "0",
    dtype: str = "float32",
    *,
    stride: object = None,
    offset: object = 0,
    held: object = None,
    storage: object = None,
    rest: tuple[object, ...] | None = None,
) -> Raw:
    """A call of _rebuild_tensor_v2; `held` is the number of elements that the storage says it
    has.
    """
    if held is None:
        held = count(shape)  # type: ignore[arg-type]
    if stride is None:
        stride = row_major(shape)  # type: ignore[arg-type]
    if storage is None:
        name = glob("torch", STORAGE[dtype][0])
        storage = persistent(("storage", name, key, "cpu", held))
    if rest is None:
        rest = (False, reduce(glob("collections", "OrderedDict")))
    return reduce(glob("torch._utils", "_rebuild_tensor_v2"), storage, offset, shape, stride, *rest)


def floats(n: int, start: float = 0.5) -> bytes:
    """n positive finite numbers."""
    return struct.pack(f"<{n}f", *(start + i / 64 for i in range(n)))


# Zip archives.


@dataclass
class Record:
    """One record; what is None is told as it is."""

    name: str
    data: bytes = b""
    size: int | None = None
    packed: int | None = None
    crc: int | None = None
    method: int = 0
    flags: int | None = None
    local: dict[str, object] = field(default_factory=dict)
    """Of the local header alone: name, extra (its bytes), extra_length, flags, method, size, crc,
    magic.
    """
    central: dict[str, object] = field(default_factory=dict)
    """Of the directory alone: name, crc, size, packed, flags, method, at, extra, folder."""
    descriptor: bytes | None = None
    repeat: int = 1
    """How often the directory lists it."""
    hidden: bool = False
    """Lies in the file, but not in the directory."""
    ghost: str | None = None
    """Lies in the directory only, at the offset of the record of this name."""


@dataclass
class End:
    """The records at the end of an archive, to be changed before they are written."""

    count64: int
    size64: int
    offset64: int
    at64: int
    count: int
    size: int
    offset: int
    here: int | None = None
    comment: bytes = b""
    with64: bool = True
    volumes: int = 1


def archive(
    records: list[Record],
    *,
    folder: str = "archive",
    crc: bool = True,
    lie: Callable[[End], None] | None = None,
    before_directory: bytes = b"",
    align: int = 64,
) -> bytes:
    """An archive as PyTorchStreamWriter lays it out: data at multiples of 64, descriptors,
    zip64 end records.
    """
    out, places, directory = bytearray(), {}, []
    for r in records:
        full = (folder + "/" + r.name if folder else r.name).encode()
        flags = r.flags if r.flags is not None else 0x0800 | (8 if r.data else 0)
        size = len(r.data) if r.size is None else r.size
        packed = len(r.data) if r.packed is None else r.packed
        check = (zlib.crc32(r.data) if crc else 0) if r.crc is None else r.crc
        at = len(out)
        if r.ghost is None:
            name = r.local.get("name", full)
            padding = -(at + 30 + len(name) + 4) % align
            extra = r.local.get("extra", b"FB" + le(2, padding) + b"Z" * padding)
            out += r.local.get("magic", b"PK\3\4") + le(2, 0) + le(2, r.local.get("flags", flags))
            out += le(2, r.local.get("method", r.method)) + le(4, 0)
            for key in ("crc", "size", "size"):
                out += le(4, r.local.get(key, 0))
            out += le(2, len(name)) + le(2, r.local.get("extra_length", len(extra))) + name + extra
            out += r.data
            if r.descriptor is not None:
                out += r.descriptor
            elif flags & 8:
                out += b"PK\7\x08" + le(4, check) + le(4, packed) + le(4, size)
            places[r.name] = at
        else:
            at = places[r.ghost]
        if r.hidden:
            continue
        c = r.central
        extra = c.get("extra", b"")
        name = c.get("name", full)
        entry = b"PK\1\2" + le(4, 0) + le(2, c.get("flags", flags))
        entry += le(2, c.get("method", r.method)) + le(4, 0) + le(4, c.get("crc", check))
        entry += le(4, c.get("packed", packed)) + le(4, c.get("size", size))
        entry += le(2, len(name)) + le(2, len(extra)) + bytes(10)
        at = places[c["like"]] if "like" in c else c.get("at", at)
        directory += [entry + le(4, at) + name + extra] * r.repeat
    out += before_directory
    start, body = len(out), b"".join(directory)
    n = len(directory)
    end = End(n, len(body), start, start + len(body), min(n, U16), len(body), start)
    if lie is not None:
        lie(end)
    out += body
    if end.with64:
        out += b"PK\6\6" + le(8, 44) + le(2, 0x031E) + le(2, 45) + bytes(8)
        out += le(8, end.count64) + le(8, end.count64) + le(8, end.size64) + le(8, end.offset64)
        out += b"PK\6\7" + le(4, 0) + le(8, end.at64) + le(4, end.volumes)
    here = end.count if end.here is None else end.here
    out += b"PK\5\6" + le(4, 0) + le(2, here) + le(2, end.count) + le(4, end.size)
    return bytes(out + le(4, end.offset) + le(2, len(end.comment)) + end.comment)


def records_of(pickle: bytes, storages: dict[str, bytes] | list[bytes]) -> list[Record]:
    """The records of a file of torch.save, in its order."""
    if not isinstance(storages, dict):
        storages = {str(i): data for i, data in enumerate(storages)}
    return [
        Record("data.pkl", pickle),
        Record(".format_version", b"1"),
        Record(".storage_alignment", b"64"),
        Record("byteorder", b"little"),
        *(Record("data/" + key, data) for key, data in storages.items()),
        Record("version", b"3\n"),
        Record(".data/serialization_id", b"0" * 40),
    ]


def item_of_tensor(shape: tuple[int, ...], data: bytes, dtype: str = "float32") -> bytes:
    return archive(records_of(P2 + tensor(shape, dtype=dtype) + b".", [data]))


def item_of_value(value: object) -> bytes:
    return archive(records_of(P2 + dump(value) + b".", []))
