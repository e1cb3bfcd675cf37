"""Files of safetensors: those of other libraries, odd ones and broken ones."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.ckpt.archives import DTYPES, bits, copy, inspect, same
from tests.support.peers.files import need_tool, run

need_tool()


def test_safetensors_of_others(tmp_path):
    tensors = {str(d): bits(d, 3, 4) for d in DTYPES if d is not torch.complex128}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.empty(0, 3), "bell\x07": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "who": "me\x1b"})
    seen = inspect(tmp_path / "a.safetensors")
    assert len(seen["tensors"]) == len(tensors) and any("who = me\\x1b" in f for f in seen["facts"])
    copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    back = load_file(tmp_path / "b.safetensors")
    assert back.keys() == tensors.keys()
    for name, t in tensors.items():
        same(t, back[name], name)
    with open(tmp_path / "b.safetensors", "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    assert "lowbit" not in header["__metadata__"]  # a plain dict of tensors needs none
    torch.save({"a": bits(torch.complex128, 2)}, tmp_path / "c.pt")
    assert "complex128" in copy(tmp_path / "c.pt", tmp_path / "c.safetensors", code=3).stderr
    assert not (tmp_path / "c.safetensors").exists()


def header(text, data=b"", length=None):
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "hole": header({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, b"\0" * 20),
    "overlap": header({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12),
    "same range": header({"a": ONE, "b": ONE}, b"\0" * 8),
    "trailing": header({"a": ONE}, b"\0" * 9),
    "short": header({"a": ONE}, b"\0" * 7),
    "long header": header({"a": ONE}, b"\0" * 8, length=5000),
    "huge header": header({"a": ONE}, b"\0" * 8, length=2**40),
    "negative": header({"a": {**ONE, "shape": [-2]}}, b"\0" * 8),
    "float": header(b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', b"\0" * 8),
    "exponent": header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}}', b"\0" * 8),
    "minus zero": header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}', b"\0" * 8),
    "three offsets": header({"a": {**ONE, "data_offsets": [0, 8, 8]}}, b"\0" * 8),
    "dtype": header({"a": {**ONE, "dtype": "F31"}}, b"\0" * 8),
    "six bits": header(
        {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"\0" * 3
    ),
    "overflow": header({"a": {**ONE, "shape": [2**62, 2**62]}}, b"\0" * 8),
    "huge beside zero": header({"a": {**ONE, "shape": [0, 2**63, 2**63], "data_offsets": [0, 0]}}),
    "half a byte": header({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"\0" * 2),
    "metadata": header({"__metadata__": {"a": 1}, "a": ONE}, b"\0" * 8),
    "utf-8": header(b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
    "surrogate": header(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
    "deep": header(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "mark": header(
        b'\xef\xbb\xbf{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8
    ),
    "zeros": header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}\0\0', b"\0" * 8),
    "twice": header(b'{"a":%s,"a":%s}' % ((json.dumps(ONE).encode(),) * 2), b"\0" * 8),
    "dtype twice": header(
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8
    ),
    "two metadata": header(b'{"__metadata__":{},"__metadata__":{}}'),
    "list": header(b"[]"),
    "convention": header({"__metadata__": {"lowbit": "[]"}, "a": ONE}, b"\0" * 8),
    "later convention": header(
        {"__metadata__": {"lowbit": '{"version":2,"leaves":[],"holders":[]}'}}
    ),
    "unplaced": header(
        {"__metadata__": {"lowbit": '{"version":1,"leaves":[],"holders":[]}'}, "a": ONE}, b"\0" * 8
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_safetensors(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(BROKEN[name])
    assert inspect(tmp_path / "a.safetensors", code=3).startswith("lowbit-ckpt: ")


def test_odd_safetensors_are_read(tmp_path):
    odd = header(
        b' {"":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":[1]},"../b":%s} '
        % json.dumps({"dtype": "BOOL", "shape": [1], "data_offsets": [8, 9]}).encode(),
        b"\0" * 8 + b"\7",
    )
    (tmp_path / "a.safetensors").write_bytes(odd)
    assert len(inspect(tmp_path / "a.safetensors")["warnings"]) == 5


# A length of a header may begin like any other container: an old pickle (0x80, 2), a zip (PK),
# a tar.
LENGTHS = [0x0080, 0x0280, 0x0580, 0x0680, 0x7F80, 0x8080, 0xFF80, 0x28002, 0x4B50, 0x14B50]


@pytest.mark.parametrize("length", LENGTHS, ids=hex)
def test_a_header_of_any_length(tmp_path, length):
    text = json.dumps({"a": ONE}).encode()
    (tmp_path / "a.safetensors").write_bytes(header(text.ljust(length), b"\0" * 8))
    assert [t["name"] for t in inspect(tmp_path / "a.safetensors")["tensors"]] == ["a"]
    (tmp_path / "b.safetensors").write_bytes(header(text.ljust(length), b"\0" * 8)[:100])
    assert inspect(tmp_path / "b.safetensors", code=3).startswith("lowbit-ckpt: ")


def test_a_header_that_reads_like_a_tar(tmp_path):
    text = json.dumps({"a" * (257 - 8 - 2) + "ustar": ONE}).encode()
    (tmp_path / "a.safetensors").write_bytes(header(text, b"\0" * 8))
    assert (tmp_path / "a.safetensors").read_bytes()[257:262] == b"ustar"
    assert len(inspect(tmp_path / "a.safetensors")["tensors"]) == 1


def test_texts_of_a_file_go_into_the_next(tmp_path):
    """Its title and licence, say. Where they cannot, a warning names them."""
    texts = {"format": "np", "modelspec.title": "x"}
    save_file({"w": torch.ones(2, 3)}, tmp_path / "a.safetensors", metadata=texts)
    run("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == texts
    done = run("convert", tmp_path / "a.safetensors", tmp_path / "b.pt")
    expected = "__metadata__ (modelspec.title) is left out"
    assert expected in done.stderr, done.stderr
