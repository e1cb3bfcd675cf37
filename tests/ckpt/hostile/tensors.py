"""Tensors that reach out of their storage, or are larger than any memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import BAD, FINE, add
from .state import ELEMENTS, SHAPE, Save, saved
from .write import floats, glob, persistent, reduce, row_major, tensor

OUT = "beyond|reach|storage|bytes|negative|natural|overflow|impossible|size|stride|offset|record"
ORDERED = reduce(glob("collections", "OrderedDict"))


def weight(*arguments: Any, **named: Any) -> Callable[[Path], Path]:
    """The plain file with another weight over the same record of 32 numbers."""
    named.setdefault("held", ELEMENTS)
    return saved(lambda s: s.tensors.__setitem__("weight", tensor(*arguments, **named)))


def put(name: str, value: object) -> Callable[[Path], Path]:
    return saved(lambda s: s.tensors.__setitem__(name, value))


for name, arguments, named, ok in (
    ("size_beyond", [(4, 9)], {}, False),
    ("size_beyond_by_one", [(33,)], {}, False),
    ("size_beyond_32_bits", [(1 << 32, 1 << 31)], {}, False),
    ("size_times_stride_wraps", [(1 << 33, 1 << 33)], {"stride": (1 << 31, 1)}, False),
    ("size_2_62", [(1 << 62,)], {}, False),
    ("size_negative", [(-1, 8)], {"stride": (8, 1)}, False),
    ("size_negative_twice", [(-4, -8)], {"stride": (8, 1)}, False),
    ("size_2_70", [(1 << 70,)], {"stride": (1,)}, False),
    ("size_wraps_to_zero", [(1 << 32, 1 << 32)], {"stride": (0, 0)}, False),
    ("offset_beyond", [SHAPE], {"offset": 1}, False),
    ("offset_negative", [SHAPE], {"offset": -1}, False),
    ("offset_wraps", [SHAPE], {"offset": (1 << 63) - 1}, False),
    ("offset_wraps_64", [SHAPE], {"offset": (1 << 64) - 4}, False),
    ("stride_beyond", [SHAPE], {"stride": (9, 1)}, False),
    ("stride_negative", [SHAPE], {"stride": (-8, 1)}, False),
    ("stride_wraps", [SHAPE], {"stride": ((1 << 62), 1)}, False),
    ("stride_wraps_64", [(3, 8)], {"stride": (1 << 63, 1)}, False),
    ("stride_count_differs", [SHAPE], {"stride": (8, 1, 1)}, False),
    ("stride_of_text", [SHAPE], {"stride": ("8", "1")}, False),
    ("size_is_no_tuple", [8], {"stride": 1}, False),
    ("size_of_floats", [(4.0, 8.0)], {"stride": (8, 1), "held": 32}, None),
    ("zero_stride_bomb", [(1 << 31,)], {"stride": (0,)}, True),
    ("zero_stride_bomb_2d", [(1 << 40, 32)], {"stride": (0, 1)}, True),
    ("zero_stride_in_the_middle", [(4, 1 << 29, 8)], {"stride": (8, 0, 1)}, True),
    ("overlapping_strides", [(25, 8)], {"stride": (1, 1)}, True),
    ("overlapping_by_one", [(4, 8)], {"stride": (7, 1)}, True),
    ("empty_but_huge", [(0, 1 << 62, 1 << 62)], {"stride": (1, 1, 1)}, None),
    ("dimensions_100000", [(1,) * 100_000], {}, None),
    ("offset_of_text", [SHAPE], {"offset": "0"}, False),
    ("key_above", [SHAPE, "../data.pkl"], {}, False),
    ("key_empty", [SHAPE, ""], {}, False),
    ("key_is_a_number", [SHAPE, 0], {}, None),
    ("key_absolute", [SHAPE, "/data/0"], {}, False),
    ("key_with_escapes", [SHAPE, "\x1b[31m\n0"], {}, False),
    ("key_missing", [SHAPE, "17"], {}, False),
    ("held_less", [SHAPE], {"held": 31}, False),
    ("held_more", [SHAPE], {"held": 33}, False),
    ("held_negative", [SHAPE], {"held": -32}, False),
    ("held_2_62", [SHAPE], {"held": 1 << 62}, False),
    ("held_2_64_wraps", [SHAPE], {"held": (1 << 62) + 32}, False),
    ("held_of_text", [SHAPE], {"held": "32"}, False),
    ("no_arguments", [SHAPE], {"rest": ()}, False),
    ("too_many_arguments", [SHAPE], {"rest": (False, ORDERED, {}, {}, {})}, False),
    ("hooks_are_a_number", [SHAPE], {"rest": (False, 7)}, None),
    ("hooks_are_full", [SHAPE], {"rest": (False, {"hook": 1})}, None),
    ("conjugate_of_a_float", [SHAPE], {"rest": (False, ORDERED, {"conj": True})}, None),
    ("conjugate_of_text", [SHAPE], {"rest": (False, ORDERED, {"conj": "True"})}, None),
    ("no_conjugate", [SHAPE], {"rest": (False, ORDERED, {"conj": False})}, None),
    ("negated_and_more", [SHAPE], {"rest": (False, ORDERED, {"neg": True, "also": True})}, None),
    ("negated_beyond", [(1 << 62,)], {"rest": (False, ORDERED, {"neg": True})}, None),
):
    add(
        "tensor." + name,
        weight(*arguments, **named),
        BAD,
        OUT + "|overlap|twice|dimension|argument|tensor|deep|missing|name|call",
        torch=ok,
    )


def storage(*parts: object) -> Callable[[Path], Path]:
    return weight(SHAPE, storage=persistent(parts))


FLOATS = glob("torch", "FloatStorage")
for name, parts in (
    ("of_one_part", ("storage",)),
    ("of_three_parts", ("storage", FLOATS, "0")),
    ("of_seven_parts", ("storage", FLOATS, "0", "cpu", 32, None, None)),
    ("of_another_word", ("module", FLOATS, "0", "cpu", 32)),
    ("of_a_type_that_is_none", ("storage", glob("torch", "float32"), "0", "cpu", 32)),
    ("of_a_type_in_text", ("storage", "FloatStorage", "0", "cpu", 32)),
    ("on_a_number", ("storage", FLOATS, "0", 7, 32)),
):
    add(
        "tensor.storage_" + name,
        storage(*parts),
        BAD,
        "storage|tensor|call|argument|expect|dtype|device",
        torch=None,
    )
add(
    "tensor.storage_is_a_number",
    weight(SHAPE, storage=7),
    BAD,
    "storage|tensor|call|argument",
    torch=False,
)
add(
    "tensor.storage_of_a_number",
    weight(SHAPE, storage=persistent(7)),
    BAD,
    "storage|tensor|call|argument",
    torch=False,
)
add(
    "tensor.storage_alone",
    put("weight", persistent(("storage", FLOATS, "0", "cpu", 32))),
    BAD,
    "storage|tensor|call|argument",
    torch=None,
)


def two_types(save: Save) -> None:
    """torch gives the second tensor the dtype of the first, without a word."""
    save.tensors["weight"] = tensor((16,), "0", "float32", held=32)
    save.tensors["exp_avg"] = tensor((16,), "0", "float64", held=16)


add("tensor.one_key_of_two_types", saved(two_types), BAD, "dtype|type|storage|Float", torch=True)


def two_sizes(save: Save) -> None:
    save.tensors["exp_avg"] = tensor(SHAPE, "0", held=16)


add("tensor.one_key_of_two_sizes", saved(two_sizes), BAD, OUT, torch=None)
add(
    "tensor.record_is_longer",
    saved(lambda s: s.storages.__setitem__("0", floats(33))),
    BAD,
    OUT,
    torch=False,
)
add(
    "tensor.record_is_shorter",
    saved(lambda s: s.storages.__setitem__("0", floats(31))),
    BAD,
    OUT,
    torch=False,
)
add(
    "tensor.record_is_empty",
    saved(lambda s: s.storages.__setitem__("0", b"")),
    BAD,
    OUT,
    torch=False,
)
add(
    "tensor.record_nobody_names",
    saved(lambda s: s.storages.__setitem__("9", floats(2))),
    FINE,
    "data/9|record|unused|unknown|names",
    torch=True,
    warns=True,
)

# Kinds without a storage of their own.
DTYPE = glob("torch", "float32")
META = glob("torch._utils", "_rebuild_meta_tensor_no_storage")
add(
    "tensor.meta_2_62",
    put("weight", reduce(META, DTYPE, (1 << 62,), (1,), False)),
    BAD,
    "meta|data|storage|allow|outside|size",
    torch=True,
)
add(
    "tensor.meta_small",
    put("weight", reduce(META, DTYPE, SHAPE, row_major(SHAPE), False)),
    BAD,
    "a meta tensor, which has no values, which is not read",
    torch=True,
    convert=(BAD,),
    about="As torch writes it: named by all, and convert leaves it out where it is told to.",
)
add(
    "tensor.meta_negative",
    put("weight", reduce(META, DTYPE, (-4, 8), (8, 1), False)),
    BAD,
    "meta",
    torch=None,
)
V3 = glob("torch._utils", "_rebuild_tensor_v3")
UNTYPED = glob("torch.storage", "UntypedStorage")


def untyped(dtype: str, shape: object, held: object) -> object:
    place = persistent(("storage", UNTYPED, "0", "cpu", held))
    strides = row_major(shape)  # type: ignore[arg-type]
    return reduce(V3, place, 0, shape, strides, False, ORDERED, glob("torch", dtype))


add(
    "tensor.untyped_held_in_elements",
    put("weight", untyped("uint16", (64,), 64)),
    BAD,
    OUT,
    torch=False,
)
add("tensor.untyped_beyond", put("weight", untyped("uint16", (65,), 128)), BAD, OUT, torch=False)
add(
    "tensor.untyped_of_no_dtype",
    put("weight", untyped("strided", (64,), 128)),
    BAD,
    "dtype|type|allow|outside|argument",
    torch=None,
)
add(
    "tensor.untyped_sound",
    saved(lambda s: s.extra.__setitem__("rng", untyped("uint16", (64,), 128))),
    FINE,
    torch=True,
    convert=None,
)
add(
    "tensor.parameter_of_a_number",
    put("weight", reduce(glob("torch._utils", "_rebuild_parameter"), 7, False, ORDERED)),
    BAD,
    "tensor|parameter|argument|call",
    torch=None,
)
nested: object = tensor(SHAPE, "0")
for _ in range(500):
    nested = reduce(glob("torch._utils", "_rebuild_parameter"), nested, False, ORDERED)
add(
    "tensor.parameter_of_a_parameter_500_times",
    put("weight", nested),
    (BAD, FINE),
    "tensor|parameter|argument|deep|nest",
    torch=None,
)
