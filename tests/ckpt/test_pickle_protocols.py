"""Pickles of other protocols and picklers: sets of protocol 4, and the memo of Python 2."""

import argparse
import io
import pickle
import pickletools
import struct
import zipfile

import pytest
import torch

from tests.ckpt.archives import same
from tests.support.peers.files import need_tool, run

need_tool()


class ByNames:
    """An object that its class makes of arguments by their names."""

    def __init__(self, data):
        self.data = data

    def __new__(cls, data=None):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"data": self.data}


PLAIN = {
    "set": {1, "two", (3, 4)},
    "empty set": set(),
    "bytearray": bytearray(b"abc"),
    "large set": set(range(3000)),
}
OBJECTS = {
    "frozenset": (frozenset({1, 2}), "builtins.frozenset"),
    "empty frozenset": (frozenset(), "builtins.frozenset"),
    "by names": (ByNames(1), "ByNames"),
    "set in an object": (argparse.Namespace(a={1}), "argparse.Namespace"),
}


def saved(tmp_path, value, protocol):
    content = {"x": value, "again": [value], "w": torch.ones(3)}
    torch.save(content, tmp_path / "a.pt", pickle_protocol=protocol)
    return content


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_of_every_protocol(tmp_path, name, protocol):
    content = saved(tmp_path, PLAIN[name], protocol)
    run("verify", tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors")
    run("convert", tmp_path / "b.safetensors", tmp_path / "c.pt")
    same(torch.load(tmp_path / "c.pt", weights_only=True), content)


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_protocol_4_are_named(tmp_path, name, protocol):
    value, cls = OBJECTS[name]
    content = saved(tmp_path, value, protocol)
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    assert "x: is opaque (" in done.stderr and cls in done.stderr
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], content["w"])


HOLDERS = {
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset({t}),
    "set in an object": lambda t: argparse.Namespace(a={t}),
    "by names": ByNames,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_in_them_are_not_left_out(tmp_path, name):
    saved(tmp_path, HOLDERS[name](torch.ones(2)), 4)
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=3).stderr
    assert "holds tensors that are not read" in error and ": x (" in error


def archive(path, body):
    """A file of torch.save around a pickle."""
    with zipfile.ZipFile(path, "w") as z:
        for name, content in {"data.pkl": body, "byteorder": "little", "version": "3"}.items():
            z.writestr("a/" + name, content)
    return path


def items(*values):
    return b"\x80\x04}(X\x01\x00\x00\x00x" + b"".join(values) + b"u."


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (items(b"\x8f(]\x90"), "has a set of lists, dicts or sets"),
        (items(b"\x8f(\x8f\x90"), "has a set of lists, dicts or sets"),
        (items(b"](K\x01\x90"), "adds to something that is not a list, set or dict"),
        (items(b"\x8fK\x01a"), "adds to something that is not a list, set or dict"),
        (items(b"ctorch\nSize\n)}\x92"), "takes no arguments by their names"),
        (items(b"\x96" + struct.pack("<Q", 99) + b"a"), "ends inside a value"),
        (items(b"cposix\nsystem\n)}\x92"), "nothing was executed"),
    ],
    ids=["list", "set", "add to a list", "append to a set", "class", "cut", "system"],
)
def test_broken_ones_are_refused(tmp_path, body, words):
    assert words in run("inspect", archive(tmp_path / "a.pt", body), code=3).stderr


def as_cpickle(content):
    """The same pickles, their memos numbered from 1, as Python 2's cPickle does."""
    out, stream = b"", io.BytesIO(content)
    for _ in range(5):  # the file's parts before its storages
        ops = list(pickletools.genops(stream))
        for (op, argument, start), end in zip(
            ops, [*(start for _, _, start in ops[1:]), stream.tell()], strict=True
        ):
            if op.name in ("BINPUT", "LONG_BINPUT"):
                out += b"r" + struct.pack("<I", argument + 1)
            elif op.name in ("BINGET", "LONG_BINGET"):
                out += b"j" + struct.pack("<I", argument + 1)
            else:
                out += content[start:end]
    return out + stream.read()


def test_the_memo_of_python_2(tmp_path):
    shared = ["a", 1]
    content = {"w": torch.arange(6.0).reshape(2, 3), "x": shared, "y": {"x": shared}}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    old = as_cpickle((tmp_path / "a.pt").read_bytes())
    assert old != (tmp_path / "a.pt").read_bytes()
    (tmp_path / "b.pt").write_bytes(old)
    same(torch.load(tmp_path / "b.pt", weights_only=True), content)
    run("verify", tmp_path / "b.pt")
    run("convert", tmp_path / "b.pt", tmp_path / "c.pt")
    same(torch.load(tmp_path / "c.pt"), content)


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word


def test_a_memo_is_numbered_in_one_way(tmp_path):
    """MEMOIZE counts entries. Where a memo begins at 1, Python's would replace "torch" by
    "posixpath" and call posixpath.basename, where a reader with a place 0 sees torch.device.
    """
    mixed = text(b"torch") + b"q\x01" + text(b"posixpath") + b"\x94" + text(b"device") + b"q\x03"
    body = b"(" + mixed + text(b"pad") + b"\x94" + text(b"basename") + b"\x94h\x01h\x03\x93"
    body += text(b"/etc/HELLO") + b"\x85Rt."
    assert pickle.loads(b"\x80\x04" + body)[-1] == "HELLO"
    for protocol in (2, 4):
        content = b"\x80" + bytes([protocol]) + body
        error = run("verify", archive(tmp_path / "a.pt", content), code=3).stderr
        assert "memo" in error and "HELLO" not in error


def test_a_memo_that_begins_at_1_has_no_0(tmp_path):
    for body, words in (
        (b"\x80\x02}q\x01X\x01\x00\x00\x00xh\x00s.", "recalls a memo entry that was never made"),
        (b"\x80\x02}q\x02.", "fills its memo out of order"),
        (b"\x80\x04}q\x01.", "fills its memo out of order"),
    ):
        assert words in run("inspect", archive(tmp_path / "a.pt", body), code=3).stderr
