"""Directories with senseless values, and those that are seldom and sound."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, VALUES, add
from .dcp import (
    SQ,
    Directory,
    Item,
    W,
    base,
    made,
    state,
)
from .state import live
from .write import P2, floats, tensor


# Values.
def number(name: str, offset: tuple[int, ...], at: int, bits: bytes) -> Callable[[Path], Path]:
    def change(d: Directory) -> None:
        it = d.items[name, offset]
        data = it.storages[0]
        it.storages = [data[: 4 * at] + bits + data[4 * at + 4 :]]

    return made(change)


NAN, INF = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
add(
    "dcp.value_nan_exp_avg",
    number("optim.state.w.exp_avg", (2, 0), 7, NAN),
    VALUES,
    "exp_avg",
    torch=True,
)
add("dcp.value_inf_exp_avg_sq", number(SQ, (0, 0), 0, INF), VALUES, "exp_avg_sq", torch=True)
add(
    "dcp.value_negative_exp_avg_sq",
    number(SQ, (2, 0), 15, floats(1, -1.0)),
    VALUES,
    "exp_avg_sq",
    torch=True,
)
add("dcp.value_nan_step", number("optim.state.w.step", (), 0, NAN), VALUES, "step", torch=True)
add("dcp.value_nan_weight", number(W, (0, 0), 3, NAN), VALUES, "nan|finite", torch=True)


# Seldom, and sound.
def many(d: Directory) -> None:
    """2000 tensors of nothing, each an item of its own."""
    for i in range(1000):
        d.tensor(f"empty.{i}", "float32", (0, 5), {(0, 0): ((0, 5), b"")}, "empty", str(i))


add("dcp.odd_extra_key", state(later="2.99"), FINE, "later|unknown|key", torch=True, warns=True)
add("dcp.odd_many_empties", made(many), FINE, convert=None)
add(
    "dcp.odd_empty_chunks",
    made(
        lambda d: (
            d.tensors[W].chunks.append(((4, 0), (0, 8))),
            d.items.__setitem__((W, (4, 0)), Item("__1_0.distcp", tensor((0, 8)), [b""], 2)),
        )
    ),
    FINE,
    torch=True,
)
add(
    "dcp.odd_hints",
    made(lambda d: [setattr(i, "hint", 9) for i in d.items.values()]),
    FINE,
    torch=True,
)
add(
    "dcp.odd_no_hints",
    made(lambda d: [setattr(i, "hint", None) for i in d.items.values()]),
    FINE,
    torch=True,
)
add(
    "dcp.odd_gaps",
    made(lambda d: [setattr(i, "gap", 4096) for i in d.items.values()]),
    FINE,
    torch=True,
)
add("dcp.odd_no_storage_meta", state(storage_meta=None), FINE, torch=True)
add(
    "dcp.odd_storage_meta_left_out",
    state(storage_meta=...),
    FINE,
    about="As torch before 2.4 wrote it.",
)
add("dcp.odd_no_version", state(version=None), FINE, torch=True)
add("dcp.odd_version_99", state(version="99.0"), FINE, "version|99", torch=True, warns=True)
add(
    "dcp.odd_no_paths",
    state(planner_data=None),
    FINE,
    convert=None,
    about="Where the keys split is then a guess.",
)
add("dcp.odd_protocol_2", made(lambda d: setattr(d, "protocol", P2)), FINE, torch=True)
add(
    "dcp.odd_stray_file",
    lambda folder: (base().write(folder) / "notes.txt").write_text("x") and folder / "checkpoint",
    FINE,
    "notes|stray|unknown|file",
    torch=True,
)
add(
    "dcp.odd_stray_data",
    lambda folder: (base().write(folder) / "__9_0.distcp").write_bytes(b"left over")
    and folder / "checkpoint",
    FINE,
    "__9_0",
    torch=True,
    warns=True,
    about="A larger job saved here before.",
)
add(
    "dcp.odd_names",
    made(lambda d: (d.value("we\x1b[31mird\n\0.\ud800../x", 1, "we\x1b[31mird\n\0", "\ud800../x"))),
    FINE,
    "name|escape|control|weird|we",
    torch=None,
    convert=None,
)
add(
    "dcp.value_with_code",
    made(lambda d: d.value("hook", live(), "hook")),
    BAD,
    r"hook|posix\W+system",
    convert=(BAD, FINE),  # copied as it is, and not run
)
