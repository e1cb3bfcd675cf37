"""Directories whose metadata says something else of a tensor than its items do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, add
from .dcp import (
    FIRST,
    HALF,
    MODULE,
    Directory,
    W,
    item,
    made,
    properties,
    weight,
)
from .state import SHAPE
from .write import Raw, Record, archive, build, dump, floats, glob, tensor
from .zips import DAMAGE, HEADER, flip, squeezed

# What the metadata says of a tensor.
CHUNK = (
    "chunk|part|missing|overlap|reach|covers|hole|nowhere|dimension|size|natural|elements|store|"
    "bits|integer"
)
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
