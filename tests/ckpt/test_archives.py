"""Checkpoints of one file: torch.save (zip and legacy), read,
written and copied between containers.
"""

import collections
import io
import json
import os
import pickle
import pickletools
import struct
import tarfile
import zipfile
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from tests.ckpt.archives import DTYPES, bits, copy, inspect, same
from tests.support.peers.files import need_tool, run
from tests.support.require import need

pytestmark = pytest.mark.slow

need_tool()


def tree(complex128=True):
    """What a training script may hand to torch.save."""
    big = torch.arange(600.0).reshape(20, 30)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    dtypes = [d for d in DTYPES if complex128 or d is not torch.complex128]
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "dtypes": {str(d): bits(d, 3, 4) for d in dtypes},
        "views": {
            "all": big,
            "row": big[3],
            "rest": big[5:, 2::3],
            "turned": big.t(),
            "own": big[:, 1:4].clone().t(),
        },
        "shapes": [
            torch.tensor(2.5),
            torch.empty(0, 5),
            torch.empty(4, 0),
            torch.randn(2, 3, 1, 4),
        ],
        "pair": (torch.ones(2), {"deep": [torch.zeros(3), "x"]}, 5),
        "one": (torch.ones(1),),
        "numbers": {0: "zero", -5: torch.ones(3), 2**40: [1, 2]},
        "floats": [0.1, -0.0, float("inf"), float("nan"), 5e-324, 1e300],
        "ints": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**31) - 1, 2**62],
        "texts": ["", "é", "\u2028", "a" * 300, "\udc80", "\\", '"', "\x00"],
        "nothing": None,
        "yes": True,
        "empty": {},
        "none": [],
        "unit": (),
        "bytes": b"\x00\xff\x80a",
        "no bytes": b"",
        "ordered": collections.OrderedDict(a=1, b=collections.OrderedDict(c=torch.ones(1))),
        "nested": [[{"a": 1}], [], [[2, (3, {"k": [4]})]]],
        "keys": {(1, 2): 3, 1.5: None, True: False},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "many": {f"k{i}": i for i in range(2003)},
        "thousand": {i: None for i in range(1000)},
        "long": list(range(2001)),
        "ordered many": collections.OrderedDict((f"k{i}", i) for i in range(1001)),
        "escape \x1b[31m.dots": torch.ones(1),
    }


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_tree_comes_back_as_it_was(tmp_path, legacy):
    given = tree()
    torch.save(given, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    seen = inspect(tmp_path / "a.pt")
    assert seen["container"] == ("legacy" if legacy else "torch")
    assert seen["values"]["optimizer.param_groups.0.lr"] == 1e-3 and seen["warnings"] == []
    copy(tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    same(given, back)
    assert inspect(tmp_path / "b.pt")["digest"] == seen["digest"]
    views = back["views"]  # one storage still, and the same strides
    shared = {n: t.untyped_storage().data_ptr() for n, t in views.items()}
    assert shared["all"] == shared["row"] == shared["rest"] == shared["turned"] != shared["own"]
    assert [t.stride() for t in views.values()] == [t.stride() for t in given["views"].values()]
    assert abs((tmp_path / "b.pt").stat().st_size - (tmp_path / "a.pt").stat().st_size) < 20000


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_what_is_left_out_leaves_no_bytes_behind(tmp_path, legacy):
    """Its storage is that of others, which get their own elements of it, tied ones together."""
    whole = torch.arange(4096.0)
    row = whole[:12]
    content = {"whole": whole, "row": row, "tied": row, "turned": row.view(3, 4).t()}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "whole")
    assert whole[2000:2002].numpy().tobytes() not in (tmp_path / "b.pt").read_bytes()
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    del content["whole"]
    same(content, back)
    assert back["row"].untyped_storage().nbytes() == 48
    assert back["row"].data_ptr() == back["tied"].data_ptr()


def test_what_is_left_out_of_tied_tensors_unties_no_others(tmp_path):
    """Its elements stay in the file, as those of the other name."""
    whole = torch.arange(64.0)
    content = {"row": whole[:12], "tied": whole[:12], "beyond": whole[6:20]}
    torch.save(content, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "tied")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["beyond"].data_ptr() == back["row"].data_ptr() + 6 * 4


def test_through_safetensors_and_back(tmp_path):
    given = tree(complex128=False)
    torch.save(given, tmp_path / "a.pt")
    copy(tmp_path / "a.pt", tmp_path / "b.safetensors")
    copy(tmp_path / "b.safetensors", tmp_path / "c.pt")
    same(given, torch.load(tmp_path / "c.pt", weights_only=True))
    seen = load_file(tmp_path / "b.safetensors")  # their own reader takes it
    assert torch.equal(seen["model.0.weight"], given["model"]["0.weight"])
    assert inspect(tmp_path / "b.safetensors")["digest"] == inspect(tmp_path / "a.pt")["digest"]


def test_files_are_those_of_torch(tmp_path):
    """Byte for byte, but for the id that torch computes from hashes of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    (tmp_path / "out").mkdir()
    for name, given in {
        "model": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "long": {
            "d": {i: i for i in range(2500)},
            "l": list(range(3000)),
            "e": {i: 0 for i in range(1000)},
        },
        "fp8": [bits(torch.float8_e4m3fn, 3, 5), bits(torch.uint16, 4)],
        "tensor": torch.randn(3),
    }.items():
        torch.save(given, tmp_path / f"{name}.pt")
        copy(tmp_path / f"{name}.pt", tmp_path / "out" / f"{name}.pt")
        a, b = (zipfile.ZipFile(p / f"{name}.pt") for p in (tmp_path, tmp_path / "out"))
        assert [i.filename for i in a.infolist()] == [i.filename for i in b.infolist()]
        pickles = [z.read(f"{name}/data.pkl") for z in (a, b)]
        if pickles[0] != pickles[1]:
            texts = [io.StringIO(), io.StringIO()]
            for p, t in zip(pickles, texts, strict=True):
                pickletools.dis(p, t)
            assert texts[0].getvalue() == texts[1].getvalue()
        for i, j in zip(a.infolist(), b.infolist(), strict=True):
            assert i.header_offset == j.header_offset
            assert i.filename.endswith("serialization_id") or a.read(i) == b.read(j)


def test_parameters_and_what_is_dropped(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 2))
    noted = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    noted.note = "of a parameter"
    plain = torch.randn(2)
    plain.note = "of a tensor"
    torch.save(
        {"w": weight, "n": noted, "p": plain, "g": torch.randn(2, requires_grad=True)},
        tmp_path / "a.pt",
    )
    assert len(inspect(tmp_path / "a.pt")["warnings"]) == 2
    copy(tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (
        type(back["w"]) is torch.nn.Parameter
        and back["w"].requires_grad
        and not back["n"].requires_grad
    )
    assert (
        type(back["n"]) is torch.nn.Parameter
        and type(back["p"]) is torch.Tensor
        and back["g"].requires_grad
    )
    same(weight, back["w"])
    copy(tmp_path / "a.pt", tmp_path / "b.safetensors")
    copy(tmp_path / "b.safetensors", tmp_path / "c.pt")
    other = torch.load(tmp_path / "c.pt", weights_only=True)
    for name in back:
        assert type(other[name]) is type(back[name])
        assert other[name].requires_grad == back[name].requires_grad
    assert load_file(tmp_path / "b.safetensors").keys() == back.keys()


def test_subclasses_of_torchao(tmp_path):
    need("torchao", bool(find_spec("torchao")), "torchao is not installed")
    from torchao import optim

    for made in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8):
        parameter = torch.nn.Parameter(torch.randn(64, 256))
        optimizer = made([parameter])
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        given = optimizer.state_dict()
        name = made.__name__
        torch.save(given, tmp_path / f"{name}.pt")
        assert any("exp_avg" in n for n in json.dumps(inspect(tmp_path / f"{name}.pt")).split('"'))
        copy(tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors")
        copy(tmp_path / f"{name}.safetensors", tmp_path / f"{name}.2.pt")
        same(given, torch.load(tmp_path / f"{name}.2.pt", weights_only=True))
        copy(tmp_path / f"{name}.pt", tmp_path / f"{name}.3.pt")
        same(given, torch.load(tmp_path / f"{name}.3.pt", weights_only=True))


def test_what_weights_only_takes(tmp_path):
    """Values that torch.load(weights_only=True) reads come back as they were,
    from every container that keeps values.
    """
    given = {
        "counter": collections.Counter(a=3, b=1),
        "no counter": collections.Counter(),
        "set": {1, 2, "x"},
        "empty set": set(),
        "complex": 1.5 - 2j,
        "bytearray": bytearray(b"\x00\xffab"),
        "no bytearray": bytearray(),
        "long": [2**64, -(2**64), 2**100, -(2**63) - 1, 2**63],
        "layout": torch.strided,
        "sparse": torch.sparse_coo,
        "nested": [{"deep": ({3}, collections.Counter(b=2))}],
        "expanded": torch.arange(3.0).expand(4, 3),
        "one": torch.ones(1).expand(9),
    }
    for legacy in (False, True):
        torch.save(given, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
        assert any("2 tensors are expanded" in w for w in inspect(tmp_path / "a.pt")["warnings"])
        run("verify", tmp_path / "a.pt")
        for name in ("b.pt", "b.safetensors", "b"):
            options = ("--container", "dcp") if name == "b" else ()
            run("convert", tmp_path / "a.pt", tmp_path / name, "--force", *options)
            run("convert", tmp_path / name, tmp_path / "c.pt", "--force")
            back = torch.load(tmp_path / "c.pt", weights_only=True)
            for key in given:
                same(given[key], back[key], key)


def test_old_arguments_of_torch(tmp_path):
    """torch 0.4 wrote None for hooks, and a torch.Size where a tuple is now."""
    tensor = torch.arange(6.0).reshape(2, 3)

    class Old:
        def __init__(self, hooks, sizes):
            self.hooks, self.sizes = hooks, sizes

        def __reduce_ex__(self, protocol):
            arguments = (tensor._typed_storage(), 0, self.sizes, (3, 1), False, self.hooks)
            return torch._utils._rebuild_tensor_v2, arguments

    content = {
        "none": Old(None, (2, 3)),
        "size": Old(collections.OrderedDict(), torch.Size([2, 3])),
    }
    for legacy in (False, True):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
        copy(tmp_path / "a.pt", tmp_path / "b.pt")
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        assert torch.equal(back["none"], tensor) and torch.equal(back["size"], tensor)
        (tmp_path / "b.pt").unlink()


@pytest.mark.parametrize(
    "first, second", [(1, True), (1.0, 1), (0.0, False), (2**60, float(2**60))], ids=str
)
@pytest.mark.parametrize("tensors", [False, True])
def test_numbers_that_are_one_key(tmp_path, first, second, tensors):
    """Python takes 1, 1.0 and True for one key and keeps one entry: which,
    readers disagree about.
    """

    class Pairs:
        pass

    class Pickler(pickle._Pickler):  # writes an empty dict, then both entries
        def save(self, obj, save_persistent_id=True):
            if isinstance(obj, Pairs):
                self.write(pickle.EMPTY_DICT + pickle.MARK)
                for key in (first, second):
                    super().save(key)
                    super().save(torch.ones(2) if tensors else 5)
                return self.write(pickle.SETITEMS)
            return super().save(obj, save_persistent_id)

    module = type("module", (), {"Pickler": Pickler, "dumps": pickle.dumps, "__name__": "pickle"})
    torch.save({"x": Pairs()}, tmp_path / "a.pt", pickle_module=module)
    error = inspect(tmp_path / "a.pt", code=3)
    assert "twice" in error or "neither text nor a whole number" in error


def test_whole_numbers_that_a_double_cannot_tell_apart(tmp_path):
    torch.save({"x": {2**60: "a", 2**60 + 1: "b"}}, tmp_path / "a.pt")
    copy(tmp_path / "a.pt", tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt") == {"x": {2**60: "a", 2**60 + 1: "b"}}


def test_refused_by_name(tmp_path):
    shared = torch.zeros(2)
    cases = {
        "too much to write": torch.zeros(1).expand(1 << 27),
        "called x.a.b": {"a": {"b": shared}, "a.b": shared},
    }
    loop = []
    loop.append(loop)
    cases["holds itself"] = loop
    for words, given in cases.items():
        for legacy in (False, True):
            torch.save({"x": given}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
            assert words in inspect(tmp_path / "a.pt", code=3)
            copy(tmp_path / "a.pt", tmp_path / "b.pt", code=3)
            assert sorted(os.listdir(tmp_path)) == ["a.pt"]


def test_what_is_no_checkpoint(tmp_path):
    path = tmp_path / "a.pt"
    for content, words in {
        b"": "empty",
        b"hello world": "neither",
        b"\x80\x02N.": "not of torch.save",
        b"PK\3\4": "zip",
    }.items():
        path.write_bytes(content)
        assert words in inspect(path, code=3)
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    assert "tar" in inspect(path, code=3)
    path.unlink()
    os.mkfifo(path)
    assert "regular file" in inspect(path, code=3)
    assert "cannot open" in inspect(tmp_path / "missing.pt", code=3)
    torch.save({"a": torch.ones(2)}, tmp_path / "real.pt")
    (tmp_path / "link.pt").symlink_to("real.pt")  # the user's own
    assert len(inspect(tmp_path / "link.pt")["tensors"]) == 1


def test_damaged_zip(tmp_path):
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(5)}, tmp_path / "a.pt")
    good = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as z:
        start = z.getinfo("a/data/0").header_offset + 128
    for at in (start + 500, start - 100, len(good) // 3, len(good) - 30):
        bad = bytearray(good)
        bad[at] ^= 16
        (tmp_path / "b.pt").write_bytes(bad)
        inspect(tmp_path / "b.pt", code=3)
        copy(tmp_path / "b.pt", tmp_path / "c.pt", code=3)
    for cut in (10, len(good) // 2, len(good) - 1):
        (tmp_path / "b.pt").write_bytes(good[:cut])
        inspect(tmp_path / "b.pt", code=3)
    for extra in (b"x" + good, good + b"x"):
        (tmp_path / "b.pt").write_bytes(extra)
        inspect(tmp_path / "b.pt", code=3)
    assert not (tmp_path / "c.pt").exists()


def test_damaged_legacy(tmp_path):
    torch.save(
        {"a": torch.arange(100.0), "b": torch.ones(5)},
        tmp_path / "a.pt",
        _use_new_zipfile_serialization=False,
    )
    good = (tmp_path / "a.pt").read_bytes()
    at = good.rindex(struct.pack("<q", 5))
    for bad in (
        good[:-1],
        good + b"x",
        good[: len(good) // 4],
        good[:at] + struct.pack("<q", 2**33) + good[at + 8 :],
    ):
        (tmp_path / "b.pt").write_bytes(bad)
        inspect(tmp_path / "b.pt", code=3)


def test_targets(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    mask = os.umask(0)
    os.umask(mask)
    for name in ("b.pt", "b.safetensors"):
        copy(tmp_path / "a.pt", tmp_path / name)
        before = (tmp_path / name).read_bytes()
        assert "exists" in copy(tmp_path / "a.pt", tmp_path / name, code=2).stderr
        assert (tmp_path / name).read_bytes() == before
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask
    copy(tmp_path / "a.pt", tmp_path / "missing" / "b.pt", code=1)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "b.safetensors"]
