"""Items of the zstd extension: frames that break off, lie about their size, or never end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, add
from .dcp import (
    FIRST,
    item,
)
from .write import le
from .zips import DAMAGE, HEADER

# zstd frames by hand: a raw block holds what it holds,
# a block of a repeated byte holds 128 kB in four bytes.
MAGIC = b"\x28\xb5\x2f\xfd"


def frame(data: bytes, *, told: int | None = None, window: int | None = None) -> bytes:
    if window is None:
        # Single segment, 4 bytes of size.
        head = b"\xa0" + le(4, len(data) if told is None else told)
    else:
        head = b"\x00" + le(1, window)
    return MAGIC + head + le(3, 1 | len(data) << 3) + data


def bomb(blocks: int, *, told: bool = False) -> bytes:
    head = b"\xe0" + le(8, blocks << 17) if told else b"\x00\x70"  # a window of 16 MiB
    return MAGIC + head + (le(3, 2 | 1 << 20) + b"\0") * blocks + le(3, 3 | 1 << 20) + b"\0"


def zstd(
    wrap: Callable[[bytes], bytes], transforms: object = ("stream.zstd/1",)
) -> Callable[[Path], Path]:
    return item(FIRST, wrap=wrap, transforms=list(transforms))  # type: ignore[call-overload]


ZSTD = "zstd|compress|decompress|frame|transform|zip|archive|stored"
add("dcp.zstd_sound", zstd(frame), FINE, about="As the zstd extension writes it.")
add("dcp.zstd_bomb_2_gib", zstd(lambda b: bomb(20_000)), BAD, ZSTD + "|limit|ratio|large|more than")
add(
    "dcp.zstd_bomb_64_gib",
    zstd(lambda b: bomb(500_000)),
    BAD,
    ZSTD + "|limit|ratio|large|more than",
)
add(
    "dcp.zstd_bomb_that_says_so",
    zstd(lambda b: bomb(500_000, told=True)),
    BAD,
    ZSTD + "|limit|ratio|large|more than",
)
add("dcp.zstd_window_2_41", zstd(lambda b: frame(b, window=0xFF)), BAD, ZSTD + "|window|memory")
add("dcp.zstd_size_lies", zstd(lambda b: frame(b, told=len(b) + 1)), BAD, ZSTD)
add("dcp.zstd_size_lies_4_gib", zstd(lambda b: frame(b, told=0xFFFFFFFF)), BAD, ZSTD)
add(
    "dcp.zstd_reserved_block",
    zstd(lambda b: MAGIC + b"\xa0" + le(4, len(b)) + le(3, 7 | len(b) << 3) + b),
    BAD,
    ZSTD,
)
add("dcp.zstd_cut", zstd(lambda b: frame(b)[:-20]), BAD, ZSTD)
add("dcp.zstd_junk_behind", zstd(lambda b: frame(b) + b"junk"), BAD, ZSTD)
add(
    "dcp.zstd_skippable_then_item",
    zstd(lambda b: b"\x50\x2a\x4d\x18" + le(4, 4) + b"skip" + frame(b)),
    (BAD, FINE),
    ZSTD,
)
add(
    "dcp.zstd_item_damaged",
    zstd(lambda b: frame(b[:900] + bytes([b[900] ^ 1]) + b[901:])),
    BAD,
    ZSTD + "|" + DAMAGE + "|" + HEADER,
)
add("dcp.zstd_not_compressed", zstd(lambda b: b), BAD, ZSTD)
add("dcp.zstd_not_said", item(FIRST, wrap=frame), BAD, ZSTD)
add("dcp.transform_unknown", zstd(lambda b: b, ["stream.rot13/1"]), BAD, "rot13|transform")
add("dcp.transform_later_version", zstd(frame, ["stream.zstd/9"]), BAD, "zstd/9|transform")
add("dcp.transforms_1000", zstd(frame, ["stream.zstd/1"] * 1000), BAD, ZSTD)
add("dcp.transform_is_a_number", zstd(frame, [7]), BAD, "transform|text|stored|entry")
