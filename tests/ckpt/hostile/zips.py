"""Archives whose parts disagree: what one reader takes for the checkpoint, another does not see."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, add, case
from .state import Save, live, put
from .write import P2, Record, archive, le

Records = list[Record]
HEADER = "header|directory|says|disagree|name|called|gap|overlap|lies|broken|record|impossible"
END = "zip|directory|end|disagree|entries|cut|impossible|volume"


def find(records: Records, name: str) -> Record:
    return next(r for r in records if r.name == name)


def changed(change: Callable[[Records], object], **how) -> Callable[[Path], Path]:
    """The plain file, its records changed."""

    def make(folder: Path) -> Path:
        records = Save().records()
        change(records)
        return put(folder, archive(records, **how))

    return make


def patched(change: Callable[[bytes], bytes], **how) -> Callable[[Path], Path]:
    """The plain file, its bytes changed."""

    def make(folder: Path) -> Path:
        return put(folder, change(Save().bytes(**how)))

    return make


def of(name: str, **fields) -> Callable[[Records], None]:
    """Sets fields of one record."""

    def change(records: Records) -> None:
        for key, value in fields.items():
            setattr(find(records, name), key, value)

    return change


def flip(name: str, at: int = 5) -> Callable[[Records], None]:
    """Flips a bit of a record after its CRC was taken."""

    def change(records: Records) -> None:
        r = find(records, name)
        r.crc = zlib.crc32(r.data)
        r.data = r.data[:at] + bytes([r.data[at] ^ 4]) + r.data[at + 1 :]

    return change


DAMAGE = "checksum|crc|damage"
add("zip.crc_of_a_tensor", changed(flip("data/0")), BAD, DAMAGE, torch=True)
add("zip.crc_of_the_last_byte", changed(flip("data/3", 127)), BAD, DAMAGE, torch=True)
add("zip.crc_of_the_pickle", changed(flip("data.pkl", 30)), BAD, DAMAGE + "|pickle")
add("zip.crc_of_a_small_record", changed(flip("version", 0)), BAD, DAMAGE + "|version")
add("zip.crc_lies", changed(of("data/2", crc=1)), BAD, DAMAGE, torch=True)
add(
    "zip.crc_zero_of_one",
    changed(of("data/2", crc=0)),
    BAD,
    DAMAGE,
    torch=True,
    about="Others have one, so it was not left out.",
)
add(
    "zip.crc_of_none",
    changed(lambda r: None, crc=False),
    FINE,
    "checksum|crc",
    torch=True,
    warns=True,
    about="As compute_crc32=False writes it.",
)
add(
    "zip.crc_zero_and_damaged",
    changed(lambda r: flip("data/0")(r) or of("data/0", crc=0)(r)),
    BAD,
    DAMAGE,
    torch=True,
)
add(
    "zip.descriptor_crc_lies",
    changed(of("data/0", descriptor=b"PK\7\x08" + le(4, 1) + le(4, 128) + le(4, 128))),
    BAD,
    "descriptor|" + HEADER,
    torch=True,
)
add(
    "zip.descriptor_size_lies",
    changed(of("data/0", descriptor=b"PK\7\x08" + le(4, 0) + le(4, 64) + le(4, 64))),
    BAD,
    "descriptor|" + HEADER,
    torch=True,
)
add(
    "zip.descriptor_missing",
    changed(of("data/0", descriptor=b"")),
    BAD,
    "descriptor|" + HEADER,
    torch=True,
)
add(
    "zip.descriptor_wide",
    changed(of("data/0", descriptor=b"PK\7\x08" + le(4, 0) + le(8, 128) + le(8, 128))),
    BAD,
    "descriptor|" + HEADER,
    torch=True,
)

# Two stories of one record.
for name, fields, more, torch in (
    ("directory_points_at_another_header", {"central": {"like": "data.pkl"}}, "", None),
    ("directory_points_into_a_record", {"central": {"at": 100}}, "", False),
    ("directory_points_at_itself", {"central": {"at": 0xFFFF0}}, "|beyond", False),
    ("directory_points_beyond", {"central": {"at": 0xFFFFFFF0}}, "|beyond", False),
    ("local_name_differs", {"local": {"name": b"archive/data/9"}}, "", True),
    ("local_name_is_longer", {"local": {"name": b"archive/data/00"}}, "", True),
    ("local_method_differs", {"local": {"method": 8}}, "", True),
    ("local_flags_differ", {"local": {"flags": 0x0800}}, "", True),
    ("local_sizes_lie", {"local": {"size": 64, "crc": 7}}, "", True),
    (
        "local_extra_is_longer",
        {"local": {"extra": b"FB" + le(2, 0), "extra_length": 0xFFFF}},
        "|beyond",
        False,
    ),
    (
        "local_extra_shifts_the_data",
        {"local": {"extra": b"FB\0\0" + b"Z" * 8, "extra_length": 4}},
        "",
        True,
    ),
    ("local_magic", {"local": {"magic": b"PK\3\5"}}, "", False),
    ("size_lies_shorter", {"size": 64, "packed": 64}, "|bytes", False),
    ("size_lies_longer", {"size": 256, "packed": 256}, "|bytes", False),
    ("size_lies_4_gib", {"size": 0xFFFFFFFE, "packed": 0xFFFFFFFE}, "|beyond|bytes", False),
    (
        "size_64_lies",
        {
            "central": {
                "size": 0xFFFFFFFF,
                "packed": 0xFFFFFFFF,
                "extra": le(2, 1) + le(2, 16) + le(8, 1 << 62) * 2,
            }
        },
        "|beyond|bytes",
        None,
    ),
    (
        "offset_64_lies",
        {"central": {"at": 0xFFFFFFFF, "extra": le(2, 1) + le(2, 8) + le(8, (1 << 64) - 8)}},
        "|beyond",
        False,
    ),
    (
        "extra_64_is_short",
        {
            "central": {
                "size": 0xFFFFFFFF,
                "packed": 0xFFFFFFFF,
                "extra": le(2, 1) + le(2, 4) + le(4, 0),
            }
        },
        "|extra",
        False,
    ),
    ("extra_is_cut", {"central": {"extra": le(2, 1) + le(2, 400)}}, "|extra", None),
):
    add(f"zip.{name}", changed(of("data/0", **fields)), BAD, HEADER + more, torch=torch)
add(
    "zip.local_name_is_the_pickles",
    changed(of("byteorder", local={"name": b"archive/data.pkl"})),
    BAD,
    HEADER,
    torch=True,
)
add(
    "zip.hidden_record",
    changed(lambda r: r.insert(1, Record("data.pkl", P2 + live() + b".", hidden=True))),
    BAD,
    HEADER,
    torch=True,
    about=(
        "A second pickle that the directory does not list: readers of the stream see it, readers "
        "of the directory do not."
    ),
)


@case("zip.two_tensors_of_one_name", BAD, "twice|two|duplicate|name", torch=True)
def two_tensors(folder: Path) -> Path:
    """Binary search finds one, a list of names the other."""
    records = Save().records()
    records.insert(6, Record("data/0", bytes(128)))
    return put(folder, archive(records))


@case("zip.two_pickles", BAD, r"twice|two|duplicate|name|posix", torch=True)
def two_pickles(folder: Path) -> Path:
    """torch takes the first, zipfile the last: a scanner reads the other one."""
    records = Save().records()
    records.append(Record("data.pkl", P2 + live() + b"."))
    return put(folder, archive(records))


@case("zip.two_pickles_first_is_live", BAD, r"twice|two|duplicate|name|posix", torch=False)
def two_pickles_first(folder: Path) -> Path:
    records = Save().records()
    records.insert(0, Record("data.pkl", P2 + live() + b"."))
    return put(folder, archive(records))


@case("zip.entry_listed_twice", BAD, "twice|two|duplicate|name|overlap|gap", torch=True)
def listed_twice(folder: Path) -> Path:
    records = Save().records()
    find(records, "data/0").repeat = 2
    return put(folder, archive(records))


@case("zip.2000_names_of_one_record", BAD, "overlap|share|same|gap", torch=True)
def many_names(folder: Path) -> Path:
    """A file of 200 kB that has 2000 tensors of 64 kB."""
    save = Save()
    save.storages["0"] = bytes(1 << 16)
    records = save.records()
    for i in range(2000):
        name = f"archive/data/{i + 10}".encode()
        records.append(
            Record(
                f"data/{i + 10}",
                bytes(1 << 16),
                ghost="data/0",
                central={"name": name},
                crc=find(records, "data/0").crc,
            )
        )
    from .write import tensor

    save.tensors["weight"] = tensor((4, 8), "0", held=1 << 14)
    records[0].data = save.pickle()
    return put(folder, archive(records))


@case("zip.overlapping_records", BAD, HEADER, torch=None)
def overlapping(folder: Path) -> Path:
    """A record whose data is another record, header and all."""
    save = Save()
    inner = archive([Record("data/9", bytes(64))], folder="archive")
    save.storages["0"] = inner[: 128 - 16] + bytes(16)
    records = save.records()
    records.append(Record("data/9", bytes(32), ghost="data/0", central={"at": 64}))
    return put(folder, archive(records))


def deflate(data: bytes) -> bytes:
    return zlib.compress(data, 9)[2:-4]


def squeezed(name: str, make: Callable[[bytes], bytes] | None = None) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        r = find(records, name)
        data = r.data if make is None else make(r.data)
        r.size, r.crc, r.data = len(data), zlib.crc32(data), deflate(data)
        r.packed, r.method = len(r.data), 8

    return change


PACKED = "compress|method|deflate"
add("zip.deflated_tensor", changed(squeezed("data/0")), BAD, PACKED, torch=True)
add("zip.deflated_pickle", changed(squeezed("data.pkl")), BAD, PACKED, torch=True)
add(
    "zip.deflate_bomb",
    changed(squeezed("data/0", lambda _: bytes(200 << 20))),
    BAD,
    PACKED,
    torch=None,
)
for method in (1, 9, 12, 14, 93, 99, 0xFFFF):
    add(
        f"zip.method_{method}",
        changed(of("data/0", method=method)),
        BAD,
        PACKED + "|record",
        torch=False,
    )
add("zip.encrypted", changed(of("data/0", flags=0x0809)), BAD, "encrypt|flag", torch=False)
add("zip.strongly_encrypted", changed(of("data/0", flags=0x0848)), BAD, "encrypt|flag", torch=False)
add("zip.patched_data_flag", changed(of("data/0", flags=0x0828)), BAD, "encrypt|flag", torch=False)
add(
    "zip.masked_headers_flag", changed(of("data/0", flags=0x2808)), BAD, "encrypt|flag", torch=False
)
