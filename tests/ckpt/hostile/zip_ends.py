"""Archives that end wrongly, are cut, or lack and misname what torch.save writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, add
from .state import Save, live, put
from .write import Record, archive
from .zips import END, HEADER, Records, changed, find, of, patched


# The end of the archive.
def end(**lies: object) -> Callable[[Path], Path]:
    def change(e) -> None:
        for key, value in lies.items():
            setattr(e, key, value(getattr(e, key)) if callable(value) else value)

    return changed(lambda r: None, lie=change)


for name, lies, ok in (
    ("offset", {"offset": 7}, True),
    ("offset_saturated", {"offset": 0xFFFFFFFE}, None),
    ("size", {"size": lambda n: n - 46}, None),
    ("count", {"count": 3}, None),
    ("count_here", {"here": 3}, None),
    ("comment", {"comment": b"comment"}, None),
    ("count64", {"count64": 1 << 40}, False),
    ("count64_fewer", {"count64": lambda n: n - 1}, True),
    ("size64", {"size64": lambda n: n + 46}, True),
    ("size64_less", {"size64": lambda n: n - 46}, False),
    ("size64_huge", {"size64": 1 << 62}, False),
    ("offset64", {"offset64": lambda n: n + 1}, False),
    ("offset64_huge", {"offset64": (1 << 64) - 1}, False),
    ("offset64_zero", {"offset64": 0}, None),
    ("at64", {"at64": lambda n: n + 1}, True),
    ("at64_huge", {"at64": (1 << 64) - 20}, None),
    ("volumes", {"volumes": 2}, None),
):
    add("zip.end_" + name, end(**lies), BAD, END, torch=ok)
add(
    "zip.end_without_zip64",
    end(with64=False),
    FINE,
    torch=True,
    about="Small archives of other writers have none.",
)
add("zip.trailing_junk", patched(lambda b: b + b"junk"), BAD, END + "|follow", torch=True)
add("zip.trailing_zeros", patched(lambda b: b + bytes(4096)), BAD, END + "|follow", torch=False)
add(
    "zip.trailing_archive",
    patched(lambda b: b + Save(extra={"extra": live()}).bytes()),
    BAD,
    END + "|follow|prefix|before|gap|posix",
    torch=None,
)
add(
    "zip.prefix_junk",
    patched(lambda b: b"junkjunk" + b),
    BAD,
    END + "|prefix|before|unknown|not a|recogni",
    torch=False,
)
add(
    "zip.prefix_of_a_script",
    patched(lambda b: b"#!/bin/sh\n" + b),
    BAD,
    END + "|prefix|before|unknown|not a|recogni",
    torch=False,
)
add(
    "zip.junk_before_the_directory",
    changed(lambda r: None, before_directory=b"junk" * 100),
    BAD,
    HEADER + "|between|" + END,
    torch=None,
)
add(
    "zip.empty_archive",
    lambda folder: put(folder, archive([])),
    BAD,
    "record|data.pkl|empty|" + END,
    torch=False,
)
add(
    "zip.end_record_only",
    lambda folder: put(folder, b"PK\5\6" + bytes(18)),
    BAD,
    "record|data.pkl|empty|short|not a|unknown|" + END,
    torch=False,
)
for keep, where in (
    (0, "nothing"),
    (3, "magic"),
    (100, "header"),
    (1000, "pickle"),
    (-1, "last_byte"),
    (-22, "end"),
    (-42, "locator"),
    (-98, "end64"),
    (-300, "directory"),
    (-1500, "data"),
):
    what = END + "|trunc|short|empty|not a|unknown|recogni|pickle"
    add(f"zip.cut_at_{where}", patched(lambda b, keep=keep: b[:keep]), BAD, what, torch=False)


# Names and required records.
def without(name: str) -> Callable[[Records], None]:
    return lambda records: records.remove(find(records, name))


add("zip.no_version", changed(without("version")), BAD, "version|archive of torch", torch=False)
add("zip.no_pickle", changed(without("data.pkl")), BAD, "data.pkl|archive of torch", torch=False)
add("zip.no_tensor", changed(without("data/2")), BAD, "data/2|missing|record", torch=False)
add(
    "zip.no_byteorder",
    changed(without("byteorder")),
    FINE,
    torch=True,
    about="Older torch writes none.",
)
add(
    "zip.only_what_is_needed",
    changed(
        lambda r: [
            without(n)(r)
            for n in (
                "byteorder",
                ".format_version",
                ".storage_alignment",
                ".data/serialization_id",
            )
        ]
    ),
    FINE,
    torch=True,
)
for text, ok in (
    (b"99\n", False),
    (b"0\n", False),
    (b"-3\n", False),
    (b"three\n", False),
    (b"", False),
    (b"3" * 4000, None),
):
    label = text[:6].decode().strip().replace("-", "minus_") or "empty"
    add(f"zip.version_{label}", changed(of("version", data=text)), BAD, "version", torch=ok)
add(
    "zip.version_4_gib_of_digits",
    changed(of("version", size=0xFFFFFFF0, packed=0xFFFFFFF0)),
    BAD,
    "version|" + HEADER + "|beyond",
    torch=False,
)
add(
    "zip.byteorder_big",
    changed(of("byteorder", data=b"big")),
    BAD,
    "endian|byte ?order",
    torch=True,
)
add(
    "zip.byteorder_nonsense",
    changed(of("byteorder", data=b"middle")),
    BAD,
    "endian|byte ?order",
    torch=False,
)
add(
    "zip.no_folder",
    changed(lambda r: None, folder=""),
    BAD,
    "folder|archive of torch|directory",
    torch=False,
)
add(
    "zip.empty_folder_name",
    changed(of("data/0", central={"name": b"/data/0"}, local={"name": b"/data/0"})),
    BAD,
    "folder|missing|record",
    torch=False,
)
add(
    "zip.two_folders",
    changed(of("data/0", central={"name": b"other/data/0"}, local={"name": b"other/data/0"})),
    BAD,
    "folder|missing|record",
    torch=False,
)
add(
    "zip.record_above",
    changed(lambda r: r.append(Record("../../above", b"x"))),
    BAD,
    "above|name|path|folder",
    torch=True,
)
add(
    "zip.folder_above",
    changed(lambda r: None, folder=".."),
    BAD,
    r"\.\.|name|path|folder",
    torch=None,
)
add(
    "zip.record_absolute",
    changed(lambda r: r.append(Record("/etc/passwd", b"x"))),
    BAD,
    "passwd|name|path|folder",
    torch=True,
)
add(
    "zip.record_with_a_nul",
    changed(lambda r: r.append(Record("data.pkl\0x", b"x"))),
    BAD,
    "name|record",
    torch=None,
)
add(
    "zip.record_not_utf8",
    changed(
        lambda r: r.append(
            Record(
                "bad",
                b"x",
                local={"name": b"archive/\xff\xfe"},
                central={"name": b"archive/\xff\xfe"},
            )
        )
    ),
    BAD,
    "name|record|utf",
    torch=None,
)
add(
    "zip.record_unknown",
    changed(lambda r: r.append(Record("extra/unknown", b"x"))),
    FINE,
    "unknown|record|extra",
    torch=True,
    warns=True,
    about="torch.save has extra files; the tool does not carry them over.",
)
add(
    "zip.name_of_60_kb",
    changed(lambda r: r.append(Record("x" * 60_000, b"x"))),
    (BAD, FINE),
    "name|record|unknown",
    torch=None,
)
add(
    "zip.10000_empty_records",
    changed(lambda r: r.extend(Record(f"extra/{i}", crc=0) for i in range(10_000)), align=1),
    (BAD, FINE),
    "record|unknown|entries",
    torch=None,
)


# Layouts that torch does not write, and reads.
add(
    "zip.align_1",
    changed(lambda r: None, align=1),
    FINE,
    torch=True,
    about="Payloads then start at any byte.",
)
add("zip.align_4096", changed(lambda r: None, align=4096), FINE, torch=True)


def instead(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def put_it(folder: Path) -> Path:
        path = folder / "checkpoint.pt"
        make(path)
        return path

    return put_it


KIND = "regular|not a|pipe|fifo|device|cannot|large|link|loop|zeros|is a"
add("zip.is_a_fifo", instead(os.mkfifo), BAD, KIND)
add("zip.is_a_link_to_zeros", instead(lambda p: p.symlink_to("/dev/zero")), BAD, KIND)
add(
    "zip.is_a_link_to_itself", instead(lambda p: p.symlink_to(p.name)), BAD, KIND + "|too many|open"
)
add(
    "zip.is_a_link_to_nothing",
    instead(lambda p: p.symlink_to("nothing")),
    BAD,
    KIND + "|no such|open|missing",
)
