"""Directories whose metadata lies, leads out, leaves holes, or is not all there."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, VALUES, add, case
from .dcp import MODULE, Directory, Item, Tensor, base, properties, size
from .state import SHAPE, live
from .write import P2, Pairs, Raw, Record, archive, build, dump, floats, glob, le, reduce, tensor
from .zips import DAMAGE, HEADER, flip, squeezed

W, SQ = "model.w", "optim.state.w.exp_avg_sq"
FIRST, SECOND = (W, (0, 0)), (W, (2, 0))
INFO = glob("torch.distributed.checkpoint.filesystem", "_StorageInfo")
INDEX = glob(MODULE, "MetadataIndex")
STEP = ("optim.state.w.step", ())


def made(change: Callable[[Directory], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        d = base()
        change(d)
        return d.write(folder)

    return make


def item(key: tuple[str, object], **fields: object) -> Callable[[Path], Path]:
    """The plain directory with fields of one item set."""

    def change(d: Directory) -> None:
        for name, value in fields.items():
            setattr(d.items[key], name, value)  # type: ignore[index]

    return made(change)


def lies(
    key: tuple[str, object] = FIRST,
    *,
    path: object = None,
    at: object = None,
    length: object = None,
) -> Callable[[Path], Path]:
    """The plain directory with another place in one storage entry; a function gets what is true."""

    def tell(truth: object, told: object) -> object:
        return truth if told is None else told(truth) if callable(told) else told

    return item(key, lie=lambda p, a, n: (tell(p, path), tell(a, at), tell(n, length)))


def weight(**fields: object) -> Callable[[Path], Path]:
    """The plain directory with fields of the weight's metadata set."""

    def change(d: Directory) -> None:
        for name, value in fields.items():
            setattr(d.tensors[W], name, value)

    return made(change)


# Places out of the folder. What lies there is the right item, so that nothing but the place is wrong.
PLACE = "folder|path|name|link|leads|regular|outside|cannot be opened"


def elsewhere(told: str, real: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        d = base()
        told_here = told.replace("FOLDER", str(folder.resolve()))
        for it in d.items.values():
            if it.file == "__1_0.distcp":
                it.lie = lambda p, a, n: (told_here, a, n)
        path = d.write(folder)
        target = folder / real
        target.parent.mkdir(parents=True, exist_ok=True)
        (path / "__1_0.distcp").rename(target)
        return path

    return make


add("dcp.path_above", elsewhere("../other/secret.bin", "other/secret.bin"), BAD, PLACE, torch=True)
add(
    "dcp.path_absolute",
    elsewhere("FOLDER/other/secret.bin", "other/secret.bin"),
    BAD,
    PLACE,
    torch=True,
)
add(
    "dcp.path_in_a_folder",
    elsewhere("sub/a.distcp", "checkpoint/sub/a.distcp"),
    BAD,
    PLACE,
    torch=True,
)
add(
    "dcp.path_through_a_folder",
    elsewhere("./a.distcp", "checkpoint/a.distcp"),
    BAD,
    PLACE,
    torch=True,
)
add(
    "dcp.path_with_a_backslash",
    elsewhere("..\\a.distcp", "checkpoint/..\\a.distcp"),
    (BAD, FINE),
    PLACE,
)
for name, path in (("empty", ""), ("dot", "."), ("dots", ".."), ("metadata", ".metadata"), ("missing", "__7_0.distcp"), ("long", "a" * 5000), ("nul", "__0_0.distcp\0.bin"), ("escapes", "\x1b[2J\r\n"), ("number", 7), ("none", None), ("device", "/dev/zero")):  # fmt: skip
    add(
        f"dcp.path_{name}",
        lies(path=lambda _, path=path: path),
        BAD,
        PLACE + "|file|missing|zip|entry|text|metadata|overlap",
    )


def replaced(
    put: Callable[[Path, Path], object], name: str = "__1_0.distcp"
) -> Callable[[Path], Path]:
    """The plain directory with a file moved away and something else in its place."""

    def make(folder: Path) -> Path:
        path = base().write(folder)
        (path / name).rename(folder / "moved")
        put(path / name, folder / "moved")
        return path

    return make


def link(to: str | None = None) -> Callable[[Path, Path], object]:
    return lambda here, moved: here.symlink_to(moved.resolve() if to is None else to)


KIND = "link|regular|cannot be|not a|missing|did not finish|directory|folder"
add("dcp.link_as_data", replaced(link()), BAD, KIND, torch=True)
add(
    "dcp.link_as_data_inside",
    replaced(lambda here, moved: (moved.rename(here.parent / "real"), here.symlink_to("real"))),
    BAD,
    KIND,
    torch=True,
)
add("dcp.link_to_itself", replaced(lambda here, moved: here.symlink_to(here.name)), BAD, KIND)
add("dcp.link_to_zeros", replaced(link("/dev/zero")), BAD, KIND)
add("dcp.link_as_metadata", replaced(link(), ".metadata"), BAD, KIND, torch=True)
add("dcp.fifo_as_data", replaced(lambda here, moved: os.mkfifo(here)), BAD, KIND)
add("dcp.fifo_as_metadata", replaced(lambda here, moved: os.mkfifo(here), ".metadata"), BAD, KIND)
add("dcp.folder_as_data", replaced(lambda here, moved: here.mkdir()), BAD, KIND)
add("dcp.folder_as_metadata", replaced(lambda here, moved: here.mkdir(), ".metadata"), BAD, KIND)
add("dcp.data_missing", replaced(lambda here, moved: None), BAD, KIND + "|__1_0", torch=False)
add(
    "dcp.data_empty",
    replaced(lambda here, moved: here.touch()),
    BAD,
    "cut|beyond|short|end",
    torch=False,
)
add(
    "dcp.data_cut",
    replaced(lambda here, moved: here.write_bytes(moved.read_bytes()[:-10])),
    BAD,
    "cut|beyond|short|end",
    torch=False,
)
add(
    "dcp.data_is_zeros",
    replaced(lambda here, moved: here.write_bytes(bytes(moved.stat().st_size))),
    BAD,
    "zip|torch.save|archive",
    torch=False,
)


# Items that are not where they are said to be.
BOUNDS = "cut|beyond|end|zip|overlap|archive|offset|length|entry|number|integer"
for name, told, ok in (
    ("length_beyond", {"length": 10**15}, None),
    ("length_short", {"length": lambda n: n - 10}, False),
    ("length_long", {"at": None, "length": lambda n: n + 1}, None),
    ("length_zero", {"length": 0}, None),
    ("length_negative", {"length": -5}, None),
    ("length_2_64", {"length": (1 << 64) + 1577}, None),
    ("length_text", {"length": "1577"}, None),
    ("offset_plus_1", {"at": lambda a: a + 1}, False),
    ("offset_beyond", {"at": 10**12}, None),
    ("offset_negative", {"at": -1}, None),
    ("offset_2_63", {"at": (1 << 63) - 1, "length": (1 << 63) - 1}, None),
    ("offset_2_64", {"at": 1 << 64}, None),
    ("offset_none", {"at": lambda a: None}, None),
):
    add("dcp." + name, lies(**told), BAD, BOUNDS, torch=ok)
add(
    "dcp.items_shared",
    made(lambda d: setattr(d.items[SECOND], "like", FIRST)),
    BAD,
    "overlap|shared|same|two",
    torch=True,
)
add(
    "dcp.items_shared_by_tensors",
    made(lambda d: setattr(d.items[SQ, (0, 0)], "like", FIRST)),
    BAD,
    "overlap|shared|same|two",
    torch=True,
)
add(
    "dcp.items_overlap",
    lies(at=lambda a: a - 1, length=lambda n: n + 1),
    BAD,
    "overlap|zip|archive",
    torch=None,
)
add(
    "dcp.items_nested",
    made(
        lambda d: (
            setattr(d.items[FIRST], "wrap", lambda b: b + d.items[STEP].bytes()),
            setattr(d.items[STEP], "like", FIRST),
            setattr(d.items[STEP], "lie", lambda p, a, n: (p, a + n - 1577, 1577)),
        )
    ),
    BAD,
    "overlap|zip|archive|end|step",
)
add(
    "dcp.entry_missing",
    item(SECOND, listed=False),
    BAD,
    "nowhere|missing|entry|stored",
    torch=False,
)
add(
    "dcp.entry_of_a_value_missing",
    item(("optim.param_groups.0.lr", None), listed=False),
    BAD,
    "nowhere|missing|entry|stored|lr",
    torch=False,
)
add(
    "dcp.entry_extra",
    made(
        lambda d: d.storage_extra.append(
            (
                build(INDEX, {"fqn": "ghost", "index": 0, "offset": size((0,))}),
                build(INFO, {"relative_path": "__0_0.distcp", "offset": 0, "length": 1261}),
            )
        )
    ),
    BAD,
    "ghost|no tensor",
    torch=True,
)
add(
    "dcp.entry_twice",
    made(
        lambda d: d.storage_extra.append(
            (
                build(INDEX, {"fqn": W, "index": 5, "offset": size((0, 0))}),
                build(INFO, {"relative_path": "__1_0.distcp", "offset": 0, "length": 1577}),
            )
        )
    ),
    BAD,
    r"twice|two|model\.w",
    torch=False,
)
add(
    "dcp.entry_is_a_tuple",
    made(lambda d: d.storage_extra.append(((W, 0), ("__0_0.distcp", 0, 5)))),
    BAD,
    "entry|expect|MetadataIndex|storage",
)
add(
    "dcp.entry_without_path",
    made(
        lambda d: d.storage_extra.append(
            (build(INDEX, {"fqn": "ghost", "index": 0}), build(INFO, {"offset": 0, "length": 5}))
        )
    ),
    BAD,
    "entry|ghost|path|storage",
)
add(
    "dcp.entry_with_a_path_as_value",
    item(FIRST, lie=lambda p, a, n: (reduce(glob("pathlib", "PosixPath"), p), a, n)),
    BAD,
    "entry|path|text|name",
)

# What the metadata says of a tensor.
CHUNK = "chunk|part|missing|overlap|reach|covers|hole|nowhere|dimension|size|natural|elements|store|bits|integer"
HALF = (2, 8)
for name, fields, ok in (
    ("chunk_missing", {"chunks": [((0, 0), HALF)]}, None),
    ("chunks_none", {"chunks": []}, None),
    ("chunk_beyond", {"chunks": [((0, 0), HALF), ((2, 0), (3, 8))]}, None),
    ("chunk_starts_beyond", {"chunks": [((0, 0), HALF), ((9, 0), HALF)]}, None),
    ("chunk_offset_wraps", {"chunks": [((0, 0), HALF), (((1 << 63) - 1, 0), HALF)]}, None),
    ("chunk_offset_negative", {"chunks": [((0, 0), HALF), ((-2, 0), HALF)]}, None),
    ("chunk_of_other_dimensions", {"chunks": [((0, 0), HALF), ((2,), (16,))]}, None),
    (
        "chunk_is_smaller_than_the_item",
        {"shape": (3, 8), "chunks": [((0, 0), (1, 8)), ((2, 0), (1, 8))]},
        None,
    ),
    ("chunks_leave_a_hole", {"shape": (5, 8), "chunks": [((0, 0), HALF), ((2, 0), HALF)]}, True),
    ("chunks_of_tuples", {"chunks": [("a", "b")]}, None),
    ("size_2_70", {"shape": (1 << 70, 8)}, False),
    ("size_2_62", {"shape": (1 << 62, 8)}, None),
    ("size_negative", {"shape": (-4, 8)}, None),
    ("size_of_text", {"shape": ("4", "8")}, None),
    ("size_dimensions_100000", {"shape": (1,) * 100_000}, None),
    ("size_differs", {"shape": (8, 4), "chunks": [((0, 0), (4, 4)), ((4, 0), (4, 4))]}, None),
):
    add("dcp." + name, weight(**fields), BAD, CHUNK, torch=ok)


def overlapping(d: Directory) -> None:
    """Two chunks of three rows each in a tensor of four, each with an item of its size."""
    for offset in ((0, 0), (2, 0)):
        del d.items[W, offset]
    d.tensor(
        W,
        "float32",
        SHAPE,
        {(0, 0): ((3, 8), floats(24)), (1, 0): ((3, 8), floats(24))},
        "model",
        "w",
    )


def overlapping_and_hole(d: Directory) -> None:
    """Volumes add up, yet a row is there twice and another not at all."""
    overlapping(d)
    for offset in ((0, 0), (1, 0)):
        del d.items[W, offset]
    d.tensor(
        W, "float32", SHAPE, {(0, 0): (HALF, floats(16)), (1, 0): (HALF, floats(16))}, "model", "w"
    )


add("dcp.chunks_overlap", made(overlapping), BAD, "overlap", torch=True)
add(
    "dcp.chunks_overlap_and_leave_a_hole",
    made(overlapping_and_hole),
    BAD,
    "overlap|missing",
    torch=True,
)
add(
    "dcp.chunk_twice",
    made(lambda d: d.tensors[W].chunks.append(((0, 0), HALF))),
    (BAD, FINE),
    "twice|overlap|chunk|elements",
    torch=True,
)
add("dcp.dtype_lies", weight(dtype="float16"), BAD, "float16", torch=True)
add("dcp.dtype_lies_same_width", weight(dtype="int32"), BAD, "int32", torch=True)
add("dcp.dtype_unknown", weight(dtype="strided"), BAD, "dtype|strided|allow")
add("dcp.dtype_complex_float", weight(dtype="complex64"), BAD, "complex64", torch=None)
add("dcp.properties_missing", weight(properties=Raw(b"N")), BAD, "dtype|properties")
add(
    "dcp.properties_of_four",
    weight(
        properties=build(
            glob(MODULE, "TensorProperties"), (glob("torch", "float32"), None, False, None)
        )
    ),
    BAD,
    "dtype|properties|tuple|five",
)
add(
    "dcp.properties_of_six",
    weight(properties=properties("float32", (None,))),
    FINE,
    about="As torch 2.15 writes them.",
)
add(
    "dcp.properties_of_nine",
    weight(properties=properties("float32", (None,) * 4)),
    (BAD, FINE),
    "properties|tuple|five|6|9|dtype",
)
SAID = "says|shape|size|dtype|float|record|bytes|storage|stride|expect|holds|tensor|item"
for name, opcodes, storages in (
    ("item_shape_differs", tensor((8, 2)), [floats(16)]),
    ("item_is_larger", tensor((3, 8)), [floats(24)]),
    ("item_is_smaller", tensor((1, 8)), [floats(8)]),
    ("item_is_flat", tensor((16,)), [floats(16)]),
    ("item_dtype_differs", tensor(HALF, dtype="float64"), [bytes(128)]),
    ("item_record_short", tensor(HALF), [floats(15)]),
    ("item_stride_zero", tensor(HALF, stride=(0, 0), held=1), [floats(1)]),
    ("item_stride_beyond", tensor(HALF, stride=(8, 2)), [floats(16)]),
    ("item_offset_beyond", tensor(HALF, offset=1), [floats(16)]),
    ("item_is_a_value", dump({"a": 1}), []),
    ("item_is_a_list_of_it", dump([tensor(HALF)]), [floats(16)]),
    ("item_has_no_record", tensor(HALF), []),
):
    add("dcp." + name, item(FIRST, opcodes=opcodes, storages=storages), BAD, SAID)
add(
    "dcp.item_strided",
    item(FIRST, opcodes=tensor(HALF, stride=(1, 2))),
    FINE,
    torch=True,
    about="A transposed weight lies so.",
)
add(
    "dcp.value_is_a_tensor",
    item(("optim.param_groups.0.lr", None), opcodes=tensor(()), storages=[floats(1)]),
    (FINE, BAD),
    "lr",
    torch=None,
)


def archived(change: Callable[[list[Record]], object], **how: object) -> Callable[[Path], Path]:
    def make(records: list[Record]) -> bytes:
        change(records)
        return archive(records, **how)  # type: ignore[arg-type]

    return item(FIRST, archive=make)


add("dcp.item_crc", archived(flip("data/0")), BAD, DAMAGE, torch=True)
add("dcp.item_deflated", archived(squeezed("data/0")), BAD, "compress|method", torch=True)
add(
    "dcp.item_record_twice",
    archived(lambda r: r.insert(5, Record("data/0", bytes(64)))),
    BAD,
    "two|twice|name",
    torch=True,
)
add(
    "dcp.item_trailing_junk",
    item(FIRST, wrap=lambda b: b + b"junk"),
    BAD,
    HEADER + "|end|zip",
    torch=True,
)
add(
    "dcp.item_without_sums",
    archived(lambda r: None, crc=False),
    FINE,
    "checksum|crc",
    torch=True,
    warns=True,
)
add(
    "dcp.value_crc",
    item(
        ("optim.param_groups.0.lr", None), archive=lambda r: (flip("data.pkl", 4)(r), archive(r))[1]
    ),
    BAD,
    DAMAGE,
)


# zstd frames by hand: a raw block holds what it holds, a block of a repeated byte holds 128 kB in four bytes.
MAGIC = b"\x28\xb5\x2f\xfd"


def frame(data: bytes, *, told: int | None = None, window: int | None = None) -> bytes:
    if window is None:
        head = b"\xa0" + le(
            4, len(data) if told is None else told
        )  # single segment, 4 bytes of size
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


# Metadata that is not all there.
def ranks(
    *,
    without: int | None,
    names: tuple[str, ...] = ("__0.metadata", "__1.metadata", "__2.metadata"),
) -> Callable[[Path], Path]:
    """As use_collectives=False leaves it: each rank's metadata names its own chunks alone. The last rank holds nothing of the weight."""

    def make(folder: Path) -> Path:
        whole = base()
        path = whole.write(folder)
        _, places = whole.files()
        (path / ".metadata").unlink()
        for rank, name in enumerate(names):
            if rank == without:
                continue
            part = base()
            for key in list(part.items):
                it = part.items[key]
                if it.file != f"__{rank}_0.distcp":
                    it.listed = False
                    told = part.tensors[key[0]]
                    if isinstance(told, Tensor):
                        told.chunks = [c for c in told.chunks if c[0] != key[1]]
                    else:
                        del part.tensors[key[0]], part.paths[key[0]]
            for key in [
                k for k, t in part.tensors.items() if isinstance(t, Tensor) and not t.chunks
            ]:
                del part.tensors[key]
                part.paths.pop(key, None)
            (path / name).write_bytes(part.metadata(places))
        return path

    return make


add("dcp.ranks_sound", ranks(without=None), FINE, about="Metadata of each rank, joined.")
add("dcp.ranks_first_missing", ranks(without=0), BAD, "missing|rank|__0")
add("dcp.ranks_middle_missing", ranks(without=1), BAD, "missing|rank|__1")
add(
    "dcp.ranks_last_missing",
    ranks(without=1, names=("__0.metadata", "__1.metadata")),
    BAD,
    "missing|part|elements",
)
add(
    "dcp.ranks_numbered_wildly",
    ranks(without=None, names=("__0.metadata", "__1.metadata", "__99999999999999999999.metadata")),
    BAD,
    "missing|rank|__2",
)


@case("dcp.torn_save", BAD, "finish|metadata")
def torn(folder: Path) -> Path:
    """.metadata is written last; without it the save did not finish."""
    path = base().write(folder)
    (path / ".metadata").unlink()
    return path


@case("dcp.torn_save_with_tmp", BAD, "finish|metadata")
def torn_tmp(folder: Path) -> Path:
    path = base().write(folder)
    (path / ".metadata").rename(path / ".metadata.tmp")
    return path


@case("dcp.empty_folder", BAD, "metadata|not a checkpoint|empty")
def empty(folder: Path) -> Path:
    path = folder / "checkpoint"
    path.mkdir()
    return path


@case("dcp.metadata_of_all_and_of_each", (BAD, FINE), "both|metadata|rank")
def both(folder: Path) -> Path:
    """A directory that was written over without being emptied."""
    path = ranks(without=None)(folder)
    shutil.copy(path / "__0.metadata", path / "__3.metadata")
    (path / ".metadata").write_bytes(base().metadata(base().files()[1]))
    return path


def state(**fields: object) -> Callable[[Path], Path]:
    """The plain directory with other or further keys in the Metadata object; `...` leaves one out."""
    return made(lambda d: d.state_extra.update(fields))


ROOT = "metadata|expect|tensors|storage|dict|path|names"
for name, fields, ok in (
    ("tensors_missing", {"state_dict_metadata": ...}, None),
    ("tensors_a_list", {"state_dict_metadata": []}, None),
    ("storage_missing", {"storage_data": ...}, None),
    ("storage_none", {"storage_data": None}, None),
    ("paths_a_list", {"planner_data": [1]}, None),
    ("paths_of_text", {"planner_data": {W: "model.w"}}, None),
    ("paths_of_floats", {"planner_data": {W: (1.5,)}}, None),
):
    add("dcp.metadata_" + name, state(**fields), BAD, ROOT, torch=ok)
for name, root in (
    ("none", None),
    ("a_dict", {"state_dict_metadata": {}}),
    ("a_number", 7),
    ("a_size", size((1,))),
):
    add(
        f"dcp.metadata_is_{name}",
        made(lambda d, root=root: setattr(d, "change", lambda p: p[:2] + dump(root) + b".")),
        BAD,
        ROOT,
    )
add(
    "dcp.metadata_without_state",
    made(lambda d: setattr(d, "change", lambda p: p[:2] + glob(MODULE, "Metadata") + b")\x81.")),
    BAD,
    ROOT,
)
add(
    "dcp.metadata_built_twice",
    made(lambda d: setattr(d, "change", lambda p: p[:-1] + b"}b.")),
    (BAD, FINE),
    ROOT + "|state",
)
add(
    "dcp.name_is_a_number",
    made(lambda d: d.tensors.__setitem__(7, d.tensors[W])),
    BAD,
    "name|text|chunk|stored",
)
add(
    "dcp.name_twice",
    made(
        lambda d: d.state_extra.update(
            state_dict_metadata=Pairs(
                [
                    (k, v.raw() if isinstance(v, Tensor) else v)
                    for k, v in [*d.tensors.items(), (W, d.tensors[W])]
                ]
            )
        )
    ),
    BAD,
    r"twice|two|duplicate|model\.w",
    torch=True,
)
add(
    "dcp.metadata_key_twice",
    made(lambda d: setattr(d, "change", lambda p: p[:-3] + dump("version") + dump("2") + p[-3:])),
    BAD,
    "twice|duplicate|two",
    torch=True,
)
add(
    "dcp.size_with_two_arguments",
    weight(shape=Raw(dump((4,)) + dump((8,)))),
    BAD,
    "size|argument|expect|call|dimension",
)
add(
    "dcp.layout_sparse",
    weight(
        properties=build(
            glob(MODULE, "TensorProperties"),
            (
                glob("torch", "float32"),
                reduce(glob("torch.serialization", "_get_layout"), "torch.sparse_coo"),
                False,
                reduce(glob(MODULE, "_MEM_FORMAT_ENCODING"), 0),
                False,
            ),
        )
    ),
    BAD,
    "layout|sparse|argument|call|strided",
)
add(
    "dcp.memory_format_7",
    weight(
        properties=build(
            glob(MODULE, "TensorProperties"),
            (
                glob("torch", "float32"),
                reduce(glob("torch.serialization", "_get_layout"), "torch.strided"),
                False,
                reduce(glob(MODULE, "_MEM_FORMAT_ENCODING"), 7),
                False,
            ),
        )
    ),
    BAD,
    "format|argument|call|MEM_FORMAT",
)
GETATTR = glob("builtins", "getattr")
for name, arguments, codes in (
    ("enum", (glob(MODULE, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT"), FINE),
    ("of_an_enum_class", (glob(MODULE, "_MEM_FORMAT_ENCODING"), "__class__"), BAD),
    ("of_a_size", (glob("torch", "Size"), "__reduce__"), BAD),
    ("of_three", (glob(MODULE, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT", 1), BAD),
):
    told = build(
        glob(MODULE, "TensorProperties"),
        (
            glob("torch", "float32"),
            reduce(glob("torch.serialization", "_get_layout"), "torch.strided"),
            False,
            reduce(GETATTR, *arguments),
            False,
        ),
    )
    add(
        f"dcp.getattr_{name}",
        weight(properties=told),
        codes,
        "getattr|argument|call|allow|attr",
        torch=True if codes == FINE else None,
    )


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
add("dcp.value_nan_weight", number(W, (0, 0), 3, NAN), FINE, "nan|finite", torch=True, warns=True)


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
)
