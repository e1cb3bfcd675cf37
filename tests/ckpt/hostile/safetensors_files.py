"""Files of safetensors: what its own reader refuses, and what it lets through and should not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, VALUES, add
from .state import put
from .write import floats, le

DATA = floats(32)


def entry(
    dtype: str = "F32", shape: object = (4, 8), at: object = (0, 128), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at, **more}


def text(header: object) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def file(
    header: object, data: bytes = DATA, *, n: int | None = None, pad: bool = True
) -> Callable[[Path], Path]:
    body = header if isinstance(header, bytes) else text(header)
    if pad:
        body += b" " * (-len(body) % 8)
    return lambda folder: put(
        folder, le(8, len(body) if n is None else n) + body + data, "checkpoint.safetensors"
    )


def raw(members: str, data: bytes = DATA) -> Callable[[Path], Path]:
    return file(b"{" + members.encode() + b"}", data)


def bad(name: str, make: Callable[[Path], Path], mentions: str, torch: bool | None = False) -> None:
    add("safetensors." + name, make, BAD, mentions, torch=torch)


def fine(
    name: str, make: Callable[[Path], Path], warning: str | None, torch: bool | None = True
) -> None:
    """There is no optimizer state in these, so what convert does is its own affair."""
    add(
        "safetensors." + name,
        make,
        FINE,
        warning or "",
        torch=torch,
        convert=None,
        warns=warning is not None,
    )


W = '"w":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]}'
RANGE = (
    "hole|gap|overlap|offset|beyond|end|bytes|size|trail|range|behind|covers|says|short|cut|length"
)
JSON = (
    "json|header|parse|expect|character|utf|text|string|number|object|key|twice|duplicate|deep|"
    "nest|depth|invalid"
)

fine("sound", file({"w": entry()}), None)
fine("no_tensors", file({}, b""), None)
fine("metadata", file({"__metadata__": {"format": "pt"}, "w": entry()}), None)
bad("hole", file({"a": entry("F32", (16,), (0, 64)), "b": entry("F32", (8,), (96, 128))}), RANGE)
bad("hole_at_the_start", file({"a": entry("F32", (16,), (64, 128))}), RANGE)
bad(
    "overlap", file({"a": entry("F32", (24,), (0, 96)), "b": entry("F32", (16,), (64, 128))}), RANGE
)
bad("range_twice", file({"a": entry(), "b": entry()}), RANGE + "|twice|same")
bad("range_shared_by_10000", file({f"t{i}": entry() for i in range(10_000)}), RANGE + "|twice|same")
bad("trailing_bytes", file({"w": entry()}, DATA + b"junk"), RANGE)
bad("short_file", file({"w": entry()}, DATA[:-1]), RANGE)
bad("no_data", file({"w": entry()}, b""), RANGE)
bad("begin_after_end", file({"w": entry(at=(128, 0))}), RANGE)
bad("size_differs", file({"w": entry("F32", (4, 9))}), RANGE + "|shape")
bad("n_beyond_the_file", file({"w": entry()}, n=10_000), RANGE + "|header")
bad("n_100_mb", file({"w": entry()}, n=100_000_001), RANGE + "|header|limit|large")
bad("n_2_63", file({"w": entry()}, n=1 << 63), RANGE + "|header|limit|large")
bad("n_2_64", file({"w": entry()}, n=(1 << 64) - 1), RANGE + "|header|limit|large")
bad("n_2_64_wraps", file({"w": entry()}, n=(1 << 64) - 8), RANGE + "|header|limit|large")
bad("n_zero", file({"w": entry()}, n=0), JSON + "|" + RANGE + "|empty")
bad("n_cuts_the_header", file({"w": entry()}, n=20), JSON + "|" + RANGE)
bad("n_reaches_into_data", file({"w": entry()}, n=72 + 64), JSON + "|" + RANGE)
bad("n_alone", lambda folder: put(folder, le(8, 8), "checkpoint.safetensors"), JSON + "|" + RANGE)
bad(
    "seven_bytes",
    lambda folder: put(folder, bytes(7), "checkpoint.safetensors"),
    JSON + "|" + RANGE + "|not a|unknown|recogni",
)
bad(
    "nothing",
    lambda folder: put(folder, b"", "checkpoint.safetensors"),
    JSON + "|" + RANGE + "|not a|unknown|recogni|empty",
)
for name, offsets in (
    ("negative", "[-1,127]"),
    ("float", "[0.0,128.0]"),
    ("exponent", "[0,128e0]"),
    ("minus_zero", "[-0,128]"),
    ("of_text", '["0","128"]'),
    ("three", "[0,128,256]"),
    ("one", "[128]"),
    ("none", "[]"),
    ("a_number", "128"),
    ("null", "null"),
    ("2_64", "[0,18446744073709551744]"),
    ("2_63", "[0,9223372036854775936]"),
    ("bool", "[false,128]"),
    ("leading_zero", "[0,0128]"),
    ("plus", "[0,+128]"),
):
    bad(
        "offsets_" + name,
        raw(f'"w":{{"dtype":"F32","shape":[4,8],"data_offsets":{offsets}}}'),
        JSON + "|offset|" + RANGE,
    )
for name, shape in (
    ("negative", "[-4,-8]"),
    ("float", "[4.0,8]"),
    ("exponent", "[4e0,8]"),
    ("minus_zero", "[-0,8]"),
    ("a_number", "32"),
    ("of_text", '["4","8"]'),
    ("wraps", "[4294967296,4294967296,32]"),
    ("wraps_to_size", "[9223372036854775840,2]"),
    ("bits_wrap", "[2305843009213693952,8]"),
    ("2_64", "[18446744073709551616,0]"),
    ("null", "null"),
    ("bool", "[true,32]"),
):
    bad(
        "shape_" + name,
        raw(f'"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,128]}}'),
        JSON + "|shape|size|dimension|overflow|" + RANGE,
    )
add(
    "safetensors.shape_empty_but_2_63",
    raw(
        '"w":{"dtype":"F32","shape":[0,9223372036854775808,9223372036854775808],"data_offsets":[0,'
        "0]}",
        b"",
    ),
    BAD,
    "shape|size|dimension|overflow",
    torch=False,
)
add(
    "safetensors.shape_empty_but_2_62",
    raw(
        '"w":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,'
        "0]}",
        b"",
    ),
    (BAD, FINE),
    "shape|size|dimension|overflow",
    torch=None,
    convert=None,
)
for name, dtype in (
    ("unknown", '"F33"'),
    ("lower", '"f32"'),
    ("number", "7"),
    ("null", "null"),
    ("empty", '""'),
    ("python", '"torch.float32"'),
    ("with_escapes", '"\\u001b[31m"'),
):
    bad(
        "dtype_" + name,
        raw(f'"w":{{"dtype":{dtype},"shape":[4,8],"data_offsets":[0,128]}}'),
        "dtype|type|" + JSON,
    )
bad(
    "f4_misaligned",
    raw('"w":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}', DATA[:2]),
    "F4|bits|align|size|shape|" + RANGE,
)
bad(
    "f6_misaligned",
    raw('"w":{"dtype":"F6_E2M3","shape":[3],"data_offsets":[0,3]}', DATA[:3]),
    "F6|bits|align|size|shape|dtype|" + RANGE,
)
bad("field_missing_dtype", raw('"w":{"shape":[4,8],"data_offsets":[0,128]}'), "dtype|" + JSON)
bad("field_missing_shape", raw('"w":{"dtype":"F32","data_offsets":[0,128]}'), "shape|" + JSON)
bad("field_missing_offsets", raw('"w":{"dtype":"F32","shape":[4,8]}'), "offset|" + JSON)
bad(
    "field_twice_dtype",
    raw('"w":{"dtype":"F32","dtype":"I32","shape":[4,8],"data_offsets":[0,128]}'),
    "twice|duplicate|" + JSON,
)
bad(
    "field_twice_shape",
    raw('"w":{"dtype":"F32","shape":[4,8],"shape":[4,8],"data_offsets":[0,128]}'),
    "twice|duplicate|" + JSON,
)
bad(
    "field_twice_by_escape",
    raw('"w":{"dtype":"F32","\\u0064type":"I32","shape":[4,8],"data_offsets":[0,128]}'),
    "twice|duplicate|" + JSON,
)
bad("entry_is_a_list", raw('"w":["F32",[4,8],[0,128]]'), JSON, torch=None)
bad("entry_is_null", raw('"w":null'), JSON)
bad("name_twice_same", raw(f"{W},{W}"), "twice|duplicate|two|" + JSON, torch=True)
bad(
    "name_twice_other_bytes",
    raw(
        '"w":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"w":{"dtype":"F32","shape":[16],'
        '"data_offsets":[64,128]}'
    ),
    "twice|duplicate|two|" + JSON,
)
bad(
    "name_twice_by_escape",
    raw(W + "," + W.replace('"w"', '"\\u0077"')),
    "twice|duplicate|two|" + JSON,
    torch=True,
)
bad(
    "metadata_twice",
    raw(f'"__metadata__":{{"a":"b"}},"__metadata__":{{"a":"c"}},{W}'),
    "twice|duplicate|metadata|" + JSON,
)
bad("metadata_of_numbers", raw(f'"__metadata__":{{"a":1}},{W}'), "metadata|" + JSON)
bad("metadata_nested", raw(f'"__metadata__":{{"a":{{"b":"c"}}}},{W}'), "metadata|" + JSON)
bad("metadata_a_list", raw(f'"__metadata__":["a"],{W}'), "metadata|" + JSON)
add(
    "safetensors.metadata_null",
    raw(f'"__metadata__":null,{W}'),
    (BAD, FINE),
    "metadata|" + JSON,
    convert=None,
)
add(
    "safetensors.metadata_key_twice",
    raw(f'"__metadata__":{{"a":"b","a":"c"}},{W}'),
    BAD,
    "twice|duplicate|metadata|" + JSON,
    torch=True,
)
bad("utf8_bad", file(b'{"\xff\xfe":' + text(entry()) + b"}"), JSON)
bad("utf8_overlong", file(b'{"\xc0\x80":' + text(entry()) + b"}"), JSON)
bad("utf8_surrogate", file(b'{"\xed\xa0\x80":' + text(entry()) + b"}"), JSON)
bad(
    "lone_surrogate_escape",
    raw('"\\ud800":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]}'),
    JSON,
)
bad("control_character", file(b'{"a\x01":' + text(entry()) + b"}"), JSON)
bad("bom", file(b"\xef\xbb\xbf" + text({"w": entry()})), JSON)
bad("nul_padding", file(text({"w": entry()}) + b"\0" * 8, pad=False), JSON)
bad("text_behind_the_header", file(text({"w": entry()}) + b" x "), JSON)
bad("two_headers", file(text({"w": entry()}) * 2), JSON)
bad("comment", file(b"{/**/" + text({"w": entry()})[1:]), JSON)
bad("trailing_comma", file(text({"w": entry()})[:-1] + b",}"), JSON)
bad("single_quotes", raw(W.replace('"', "'")), JSON)
bad("nan", raw('"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,128]}'), JSON)
bad("header_is_a_list", file([entry()]), JSON)
bad("header_is_a_number", file(b"7"), JSON)
bad("header_is_cut", file(text({"w": entry()})[:-3]), JSON)
bad(
    "deep_in_an_entry",
    raw(
        '"w":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128],"x":'
        + "[" * 100_000
        + "]" * 100_000
        + "}"
    ),
    JSON,
)
bad("deep_open_only", file(b'{"w":' + b'{"a":' * 400_000), JSON)
bad("deep_lists_of_megabytes", file(b"[" * 2_500_000), JSON)
bad(
    "number_of_a_megabyte",
    raw('"w":{"dtype":"F32","shape":[' + "1" * 1_000_000 + '],"data_offsets":[0,128]}'),
    JSON + "|shape|size|dimension|overflow",
)

fine("odd_leading_space", file(b"  " + text({"w": entry()})), "space|begin|start")
fine("odd_unknown_field", file({"w": entry(later=[1, {"a": None}])}), "later|field|unknown")
fine("odd_empty_name", file({"": entry()}), "name|empty")
fine("odd_name_with_nul", file({"a\0b": entry()}), "name|control|nul|unusual")
fine("odd_name_above", file({"../../etc/passwd": entry()}), r"name|\.\.|path|unusual")
fine("odd_name_with_escapes", file({"\x1b[2J\r\n": entry()}), "name|control|escape|unusual")
fine("odd_name_of_a_megabyte", file({"n" * 1_000_000: entry()}), "name|long")
fine(
    "odd_unaligned_header",
    file(text({"w": entry()}) + b" " * (1 + -len(text({"w": entry()})) % 8), pad=False),
    "align",
)
fine(
    "odd_unaligned_tensor",
    file({"a": entry("U8", (1,), (0, 1)), "b": entry("F32", (8,), (1, 33))}, DATA[:33]),
    "align",
)
fine("odd_bool_7", file({"w": entry("BOOL", (4,), (0, 4))}, b"\0\1\7\1"), "bool")
add(
    "safetensors.odd_65_dimensions",
    file({"w": entry("F32", (1,) * 65, (0, 4))}, DATA[:4]),
    (BAD, FINE),
    "dimension",
    torch=True,
    convert=None,
    warns=True,
)
fine("odd_inf_weight", file({"w": entry("F32", (1,), (0, 4))}, b"\0\0\x80\x7f"), "inf|finite")
add(
    "safetensors.odd_nan_weight",
    file({"w": entry("F32", (1,), (0, 4))}, b"\0\0\xc0\x7f"),
    VALUES,
    "nan|finite",
    torch=True,
    convert=None,
)
fine(
    "odd_many_empty",
    file({f"t{i}": entry("F32", (0, 5), (0, 0)) for i in range(20_000)}, b""),
    None,
)
fine(
    "odd_not_in_order",
    file({"b": entry("F32", (16,), (64, 128)), "a": entry("F32", (16,), (0, 64))}),
    None,
)
fine("odd_scalar", file({"w": entry("F32", (), (0, 4))}, DATA[:4]), None)
fine("odd_f4", file({"w": entry("F4", (4,), (0, 2))}, DATA[:2]), None, torch=None)
fine(
    "odd_shards_hint",
    file(
        {
            "__metadata__": {
                "DCP_SHARDING_INFO": '{"w":{"saved_offsets":[4,0]}}',
                "DCP_VERSION": "1.0",
                "format": "pt",
            },
            "w": entry(),
        }
    ),
    "DCP|shard",
    torch=True,
)
add(
    "safetensors.disguised_zip",
    lambda folder: put(folder, b"PK\3\4" + bytes(100), "checkpoint.safetensors"),
    BAD,
    JSON + "|zip|" + RANGE,
    torch=False,
)
