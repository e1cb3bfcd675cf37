"""Objects of classes that are not on the allowlist: named, never built, and no hindrance to the rest of the file."""

import argparse
import collections
import datetime
import enum
import functools
import io
import json
import os
import pathlib
import pickle
import re
import subprocess
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peer_files import need_tool, run

import lowbit

need_tool()


class Config:
    """As omegaconf's, or a Trainer's arguments: an object with attributes, some of them objects."""

    def __init__(self):
        self.lr, self.inner, self.weight = 1e-3, argparse.Namespace(a=1), torch.ones(5)
        self.me = self

    def method(self):
        return self.lr

    @classmethod
    def made(cls, value):
        return cls()


class Made:
    """Made anew by a method of another class."""

    def __reduce__(self):
        return Config.made, (1,)


class Called:
    """What it gives is known only to who runs it."""

    def __init__(self, function=json.loads, arguments=("1",)):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Mode(enum.Enum):
    FAST = "fast"


class Named(enum.Enum):
    """A member is pickled by its name, as Python 3.11.2 does to every enum's."""

    FAST = "fast"

    def __reduce_ex__(self, protocol):
        return getattr, (self.__class__, self.name)


class Listed(list):
    pass


def optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(3, 5)).sum().backward()
    opt.step()
    return model, opt


OBJECTS = {
    "namespace": (argparse.Namespace(lr=0.1, layers=[1, 2]), "argparse.Namespace"),
    "config": (Config(), "Config"),
    "enum": (Mode.FAST, "Mode"),
    "enum by name": (Named.FAST, "Named"),
    "class": (Config, "Config"),
    "path": (pathlib.PosixPath("a/b"), "PosixPath"),
    "date": (datetime.datetime(2024, 1, 2), "datetime.datetime"),
    "list of a class": (Listed([1, 2]), "Listed"),
    "objects": (np.array([{}, None], dtype=object), "numpy.ndarray"),
    "module": (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()), "torch.nn.modules"),
    "function": (torch.nn.functional.relu, "torch.nn.functional.relu"),
    "a call": (Called(), "json.loads"),
    "partial": (functools.partial(torch.nn.functional.gelu, approximate="tanh"), "functools.partial"),
    "deque": (collections.deque([1, 2], maxlen=4), "collections.deque"),
    "range": (range(5), "range"),
    "pattern": (re.compile("a+"), "re._compile"),
    "iterator": (iter([1, 2]), "iter"),
    "RandomState": (np.random.RandomState(0), "numpy.random._pickle"),
    "Generator": (np.random.default_rng(0), "numpy.random._pickle"),
    "method": (Config().method, "Config"),
    "made by a method": (Made(), "Config"),
    "schedule": ({"lr_lambdas": [max, abs]}, "max"),
}  # fmt: skip
WITH_TENSORS = ("config", "module", "method")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", OBJECTS)
def test_the_rest_is_read(tmp_path, name, legacy):
    given, cls = OBJECTS[name]
    model, opt = optimizer()
    content = {
        "model": model.state_dict(),
        "args": given,
        "optimizer": opt.state_dict(),
        "epoch": 3,
    }
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    report = json.loads(run("inspect", tmp_path / "a.pt", "--json").stdout)
    assert report["dialect"] == "torch" and report["values"]["epoch"] == 3
    shown = {k: v for k, v in report["values"].items() if k.startswith("args")}
    assert cls in json.dumps(shown) and "opaque" in json.dumps(shown)
    # verify says so: torch would import and run what it names.
    error = run("verify", tmp_path / "a.pt", code=3).stderr
    assert "args" in error and cls in error and "nothing was executed" in error
    done = run("verify", tmp_path / "a.pt", "--opaque")
    assert "args" in done.stderr and "is opaque, not read" in done.stderr
    # convert takes the rest, where the user says so if there are tensors in it.
    rest = ["--exclude", "args"] if name in WITH_TENSORS else []
    if rest:
        error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3).stderr  # fmt: skip
        assert "holds tensors that are not read" in error and "--exclude" in error
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", *rest)
    assert ("warning: args" in done.stderr and "is left out" in done.stderr) == (not rest)
    run("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "torch", *rest)
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], opt.state_dict()["state"][0]["exp_avg"])  # fmt: skip
    assert back["epoch"] == 3 and "args" not in back
    for container in ("safetensors", "dcp"):
        run("convert", tmp_path / "a.pt", tmp_path / container, "--container", container, *rest)
    run("reshard", tmp_path / "a.pt", tmp_path / "r", "--world-size", "2", *rest)
    done = run("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    assert "the same" in done.stdout and "not compared" in done.stderr


def test_in_a_list_the_place_stays(tmp_path):
    torch.save({"x": [torch.ones(2), argparse.Namespace(), torch.zeros(2)]}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt")["x"]
    assert back[1] is None and torch.equal(back[2], torch.zeros(2))


class Numpy1(pickle._Pickler):
    """Names numpy's functions as numpy 1 does, which wrote most files."""

    def save_global(self, obj, name=None):
        module = getattr(obj, "__module__", "") or ""
        if not module.startswith("numpy._core"):
            return super().save_global(obj, name)
        old = module.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{old}\n{name or obj.__qualname__}\n".encode())
        self.memoize(obj)

    dispatch: ClassVar = {
        **pickle._Pickler.dispatch,
        **dict.fromkeys((type(np.array), type(lambda: 0)), save_global),
    }


class NumpyModule:
    """A pickle module for torch.save."""

    Pickler = Numpy1
    dumps = pickle.dumps


@pytest.fixture(params=["numpy 2", "numpy 1"])
def numpy_save(request):
    def save(content, path):
        module = NumpyModule if request.param == "numpy 1" else pickle
        torch.save(content, path, pickle_module=module)
        with torch.serialization._open_zipfile_reader(io.BytesIO(path.read_bytes())) as z:
            names = z.get_record("data.pkl")
        assert (b"cnumpy.core.multiarray\n" in names) == (request.param == "numpy 1")
        assert (b"cnumpy._core.multiarray\n" in names) == (request.param == "numpy 2")

    return save


def test_numbers_of_numpy(tmp_path, numpy_save):
    given = {
        "double": np.float64(0.1), "float": np.float32(2.5), "int": np.int64(-7), "byte": np.uint8(200),
        "bool": np.bool_(True), "best": [np.float64(0.5), 1], "complex": np.complex64(1.5 - 2j), "wide": np.complex128(complex(0.1, -np.inf)),
        "text": np.str_("aé€😀"), "no text": np.str_(""), "long": np.str_("x" * 5000), "bytes": np.bytes_(b"a\0\xffb"), "no bytes": np.bytes_(b""),
    }  # fmt: skip
    numpy_save(given, tmp_path / "a.pt")
    report = json.loads(run("inspect", tmp_path / "a.pt", "--json").stdout)
    assert any("numpy" in w for w in report["warnings"])
    run("verify", tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "s.safetensors")
    run("convert", tmp_path / "s.safetensors", tmp_path / "d", "--container", "dcp")
    for source in ("a.pt", "d"):
        done = run("convert", tmp_path / source, tmp_path / "b.pt", "--force")
        assert "opaque" not in done.stderr
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        assert back == given
        kinds = {"double": float, "int": int, "complex": complex, "text": str, "bytes": bytes}
        assert all(type(back[name]) is kind for name, kind in kinds.items())


def test_text_of_numpy_that_is_no_text_stays_opaque(tmp_path):
    np_str = Called(np._core.multiarray.scalar, (np.dtype("U1"), b"\x00\xd8\x00\x00"))
    torch.save({"surrogate": np_str, "w": torch.ones(2)}, tmp_path / "a.pt")
    assert "opaque" in run("inspect", tmp_path / "a.pt").stdout


def same(a, b):
    """Whether two values with arrays are the same, types and dtypes too."""
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and np.array_equal(a, b, a.dtype.kind == "f")  # fmt: skip
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def arrays():
    """Of every plain dtype, and of shapes that a writer may get wrong."""
    kinds = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    out = {kind: np.arange(-3, 3).astype(kind) for kind in kinds}
    out |= {"empty": np.zeros((0, 3)), "none": np.array(1.5), "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3))}  # fmt: skip
    return {**out, "nan": np.array([np.nan, np.inf]), "listed": [np.arange(3), "x"]}


def test_arrays_of_numpy(tmp_path, numpy_save):
    """As `rng_state.pth` has them: a run goes on with the same numbers, through any container."""
    _, opt = optimizer()
    given = {"numpy": np.random.get_state(), **arrays()}
    numpy_save({"rng": given, "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    shown = run("inspect", tmp_path / "a.pt").stdout
    assert "<numpy.ndarray uint32 [624]>" in shown and "<numpy.ndarray float64 [2, 3]>" in shown
    assert run("verify", tmp_path / "a.pt").stderr == ""
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp")
    run("convert", tmp_path / "d", tmp_path / "c.pt")
    run("reshard", tmp_path / "a.pt", tmp_path / "r", "--world-size", "2")
    run("convert", tmp_path / "r", tmp_path / "e.pt")
    for path in ("b.pt", "c.pt", "e.pt"):
        assert run("diff", tmp_path / "a.pt", tmp_path / path, "--include", "rng*").stdout
        back = torch.load(tmp_path / path, weights_only=False)["rng"]
        assert set(back) == set(given)  # directories sort names
        for name, value in given.items():
            assert same(value, back[name]), (path, name, back[name])
        np.random.set_state(back["numpy"])
    # torch's allowlist has the names that the file had.
    names = (tmp_path / "b.pt").read_bytes()
    source = (tmp_path / "a.pt").read_bytes()
    for name in (b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"):
        assert (name in names) == (name in source)
    # JSON has no place for them.
    done = run("convert", tmp_path / "a.pt", tmp_path / "s.safetensors")
    assert "warning: rng.numpy: is opaque (numpy.ndarray uint32 [624]) and is left out" in done.stderr  # fmt: skip


def test_other_arrays_differ(tmp_path):
    torch.save({"x": np.arange(3), "w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"x": np.arange(1, 4), "w": torch.ones(2)}, tmp_path / "b.pt")
    assert (
        "x: has another value" in run("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=4).stdout
    )


@pytest.mark.parametrize("place", [("state", 0, "exp_avg"), ("param_groups", 0, "lr")])
def test_an_array_in_an_optimizer(tmp_path, place):
    """In the place of a tensor it is no tensor: copied as it is, and never left out."""
    _, opt = optimizer()
    content = {"optimizer": opt.state_dict(), "w": torch.ones(3)}
    entry = content["optimizer"][place[0]][place[1]]
    entry[place[2]] = np.arange(3.0)
    torch.save(content, tmp_path / "a.pt")
    for to in ("lowbit", "torch"):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", to, code=3).stderr
        assert (
            ".".join(map(str, place)) in error and "is opaque (numpy.ndarray float64 [3])" in error
        )
    run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", code=3)
    assert not (tmp_path / "b.pt").exists() and not (tmp_path / "b.safetensors").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)["optimizer"][place[0]][place[1]]
    assert same(entry[place[2]], back[place[2]])


NUMBERS = {
    "f2": (0.1, float(np.float16(0.1))), "f4": (0.1, float(np.float32(0.1))), "f8": (0.1, 0.1), "i1": (-3, -3), "u1": (200, 200),
    "i4": (-70000, -70000), "i8": (2**62 + 1, 2**62 + 1), "u8": (2**64 - 1, 2**64 - 1), "?": (True, True),
}  # fmt: skip


@pytest.mark.parametrize("scalar", [False, True], ids=["array", "scalar"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_every_dtype_as_settings(tmp_path, kind, scalar):
    """An array of no dimensions is the number that it holds, to the last bit, in any container."""
    given, wanted = NUMBERS[kind]
    _, opt = optimizer()
    number = np.array(given, dtype=kind)
    content = {"optimizer": opt.state_dict(), "w": torch.ones(3), "mine": np.array(1.5)}
    content["optimizer"]["param_groups"][0] |= {"weight_decay": number[()] if scalar else number}
    torch.save(content, tmp_path / "a.pt")
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    for source in ("a.pt", "d"):
        for to in ("torch", "lowbit"):
            run("convert", tmp_path / source, tmp_path / "b.pt", "--to", to, "--force")
            back = torch.load(tmp_path / "b.pt", weights_only=False)
            value = back["optimizer"]["param_groups"][0]["weight_decay"]
            assert type(value) is type(wanted) and value == wanted
            assert same(back["mine"], np.array(1.5))  # which is no setting
        assert json.loads(run("inspect", tmp_path / source, "--json").stdout)["dialect"] == "torch"
        run("convert", tmp_path / source, tmp_path / "s.safetensors", "--force")
        run("convert", tmp_path / "s.safetensors", tmp_path / "t.pt", "--force")
        back = torch.load(tmp_path / "t.pt", weights_only=True)
        assert back["optimizer"]["param_groups"][0]["weight_decay"] == wanted and back["mine"] == 1.5  # fmt: skip


def test_arrays_of_no_dimensions_inside_settings(tmp_path):
    """A pair of betas, an infinite limit and a half that is not normal; one with dimensions stays refused."""
    _, opt = optimizer()
    group = opt.param_groups[0]
    group["betas"] = (np.array(0.8), np.array(0.9, "f4"))
    group["mine"] = [np.array(np.inf, "f2"), np.array(2.0**-24, "f2"), np.array(-1.5, "f2")]
    group["lr"] = np.array(0.5)
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    back = torch.load(tmp_path / "b.pt", weights_only=True)["param_groups"][0]
    assert back["betas"] == (0.8, float(np.float32(0.9))) and back["lr"] == 0.5
    assert back["mine"] == [float("inf"), 2.0**-24, -1.5]
    model, _ = optimizer()
    loaded = lowbit.AdamW(model.parameters())
    lowbit.load_optimizer(loaded, tmp_path / "a.pt")
    assert loaded.param_groups[0]["lr"] == 0.5 and loaded.param_groups[0]["betas"] == back["betas"]
    group["lr"] = np.array([0.5])
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "lowbit", code=3).stderr
    assert "param_groups.0.lr: is opaque (numpy.ndarray float64 [1])" in error


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("number", [np.array(5.0), np.array(5, "f4"), np.array(5), np.int64(5)])
def test_numbers_of_numpy_in_the_state(tmp_path, number, flat):
    """A count of steps, and a number of the user's, read as the numbers that they are; without --to they stay arrays."""
    model, opt = optimizer()
    content = opt.state_dict()
    moment = content["state"][0]["exp_avg"]
    for state in content["state"].values():
        state |= {"step": number, "mine": np.array(7)}
    if flat:
        items = {f"state.{n}.{k}": v for n, s in content["state"].items() for k, v in s.items()}
        groups = {f"param_groups.{n}.{k}": v for n in (0, 1) for k, v in content["param_groups"][0].items() if k != "params"}  # fmt: skip
        content = items | groups
    torch.save(content, tmp_path / "a.pt")
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    for source in ("a.pt", "d"):
        assert json.loads(run("inspect", tmp_path / source, "--json").stdout)["dialect"] == "torch"
        for to in ("torch", "lowbit", "bitsandbytes")[: 2 if flat else 3]:
            run("convert", tmp_path / source, tmp_path / "b.pt", "--to", to, "--force")
            back = torch.load(tmp_path / "b.pt", weights_only=True)
            assert (back["state.0.step"] if flat else back["state"][0]["step"]) == 5
        run("convert", tmp_path / source, tmp_path / "s.safetensors", "--force")
        run("convert", tmp_path / "s.safetensors", tmp_path / "t.pt", "--to", "torch", "--force")
        back = torch.load(tmp_path / "t.pt", weights_only=True)
        assert (back["state.0.step"] if flat else back["state"][0]["step"]) == 5
    run("convert", tmp_path / "a.pt", tmp_path / "c.pt")
    back = torch.load(tmp_path / "c.pt", weights_only=False)
    assert same(back["state.0.mine"] if flat else back["state"][0]["mine"], np.array(7))
    if not flat:
        loaded = lowbit.AdamW(model.parameters(), state_format="float32")
        lowbit.load_optimizer(loaded, tmp_path / "a.pt")
        assert loaded.state_dict()["state"][0]["step"] == 5
        assert torch.equal(loaded.state_dict()["state"][0]["exp_avg"], moment)


def test_an_array_of_no_dimensions_is_no_moment(tmp_path):
    """Not even of a parameter without dimensions, whose moment is a tensor."""
    _, opt = optimizer()
    content = opt.state_dict()
    content["state"][0]["exp_avg"] = np.array(1.0)
    torch.save(content, tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    assert "state.0.exp_avg: is opaque (numpy.ndarray float64 [])" in error


def test_numpy_in_the_settings_of_a_group(tmp_path):
    _, opt = optimizer()
    opt.param_groups[0]["lr"] = np.float64(0.5)
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    assert torch.load(tmp_path / "b.pt")["param_groups"][0]["lr"] == 0.5


def test_a_defaultdict_is_a_dict(tmp_path):
    given = collections.defaultdict(list, a=[1], b=[torch.ones(2)])
    torch.save({"x": given}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)["x"]
    assert type(back) is dict and back["a"] == [1] and torch.equal(back["b"][0], torch.ones(2))


def test_a_whole_model_says_what_to_do(tmp_path):
    torch.save(torch.nn.Linear(3, 2), tmp_path / "a.pt")
    error = run("inspect", tmp_path / "a.pt", code=3).stderr
    assert "one object of torch.nn.modules.linear.Linear" in error and "state_dict()" in error


SYSTEM = {
    "posix.system": (os.system, ("true",)),
    "Popen": (subprocess.Popen, (["true"],)),
    "eval": (eval, ("1",)),
    "exec": (exec, ("1",)),
    "setattr": (setattr, (Config, "a", 1)),
    "importlib.import_module": (__import__("importlib").import_module, ("os",)),
    "pickle.loads": (pickle.loads, (b"",)),
    "getattr": (getattr, ({}, "get")),
}


@pytest.mark.parametrize("name", SYSTEM)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside an object"])
def test_what_names_the_system_is_refused(tmp_path, name, inside):
    """Also where it would stay unread: whoever loads the file runs it."""
    call = Called(*SYSTEM[name])
    torch.save({"x": argparse.Namespace(a=call) if inside else call}, tmp_path / "a.pt")
    for command in ("inspect", "verify"):
        error = run(command, tmp_path / "a.pt", code=3).stderr
        assert name in error and "nothing was executed" in error
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=3)
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("value", [..., NotImplemented, len, range(3)], ids=str)
def test_builtins_that_reach_nothing_are_opaque(tmp_path, value):
    torch.save({"x": value, "w": torch.ones(2)}, tmp_path / "a.pt")
    assert "x: is opaque" in run("convert", tmp_path / "a.pt", tmp_path / "b.pt").stderr


def test_an_array_that_is_the_whole_file(tmp_path):
    torch.save(np.arange(3), tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", code=3).stderr
    assert "the whole: is opaque (numpy.ndarray int64 [3])" in error


def test_addresses_for_numbers(tmp_path):
    """Old torch keyed parameters by id(p): they are taken in the groups' order."""
    _, opt = optimizer()
    content = opt.state_dict()
    ids = [2259262640440, 2259262640368]
    content["state"] = {ids[i]: s for i, s in content["state"].items()}
    content["param_groups"][0]["params"] = ids
    torch.save(content, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch")
    assert "by address" in done.stderr
    back = torch.load(tmp_path / "b.pt")
    assert back["param_groups"][0]["params"] == [0, 1]
    for i, old in enumerate(ids):
        assert torch.equal(back["state"][i]["exp_avg"], content["state"][old]["exp_avg"])
    _, other = optimizer()
    other.load_state_dict(back)


# Directories, where each value is a file of torch.save of its own.

ITEMS = {
    "namespace": (argparse.Namespace(lr=0.1), "argparse.Namespace"),
    "call": (Called(), "json.loads"),
    "array": (np.arange(4.0), "numpy.ndarray float64 [4]"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_in_a_directory(tmp_path, name):
    given, cls = ITEMS[name]
    _, opt = optimizer()
    content = {"args": given, "w": torch.ones(3), "optimizer": opt.state_dict(), "list": [torch.ones(1), given]}  # fmt: skip
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    report = json.loads(run("inspect", tmp_path / "d", "--json").stdout)
    shown = json.dumps(report["values"]["args"])
    assert cls in shown and ("opaque" in shown) == (name != "array")
    if name == "array":  # which Reader loads, and runs nothing
        assert "opaque" not in run("verify", tmp_path / "d").stderr
    else:
        error = run("verify", tmp_path / "d", code=3).stderr
        assert "args" in error and cls in error and "nothing was executed" in error
        assert f"is opaque, not read: {cls}" in run("verify", tmp_path / "d", "--opaque").stderr
    # A file leaves it out, but for arrays; a directory keeps it as it is.
    done = run("convert", tmp_path / "d", tmp_path / "b.pt", "--to", "lowbit")
    back = torch.load(tmp_path / "b.pt", weights_only=name != "array")
    if name == "array":
        assert done.stderr == "" and same(given, back["args"]) and same(given, back["list"][1])
    else:
        assert f"warning: args: is opaque ({cls}) and is left out" in done.stderr
        assert "args" not in back and back["list"][1] is None
    assert torch.equal(back["w"], torch.ones(3))
    run("convert", tmp_path / "d", tmp_path / "s.safetensors")
    for done in (
        run("convert", tmp_path / "d", tmp_path / "e", "--to", "lowbit"),
        run("reshard", tmp_path / "d", tmp_path / "r", "--world-size", "2"),
    ):
        assert "left out" not in done.stderr
    for path in ("e", "r"):
        wanted = read_item(tmp_path / "d", "args")
        assert str(read_item(tmp_path / path, "args")) == str(wanted)
    run("diff", tmp_path / "d", tmp_path / "r")
    other = {**content, "args": argparse.Namespace(lr=0.2)}
    dcp.save(other, checkpoint_id=tmp_path / "o", no_dist=True)
    assert "args" in run("diff", tmp_path / "d", tmp_path / "o", code=4).stdout


def read_item(path, name):
    metadata = dcp.FileSystemReader(path).read_metadata()
    place = {i.fqn: p for i, p in metadata.storage_data.items()}[name]
    content = (path / place.relative_path).read_bytes()[place.offset :][: place.length]
    return torch.load(io.BytesIO(content), weights_only=False)


def test_numbers_of_numpy_in_a_directory(tmp_path):
    content = {"best": np.float64(0.5), "epoch": np.int64(3), "w": torch.ones(3)}
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    run("verify", tmp_path / "d")
    assert json.loads(run("inspect", tmp_path / "d", "--json").stdout)["values"]["best"] == 0.5
    run("convert", tmp_path / "d", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["best"] == 0.5 and back["epoch"] == 3 and type(back["epoch"]) is int
    run("reshard", tmp_path / "d", tmp_path / "r", "--world-size", "2")
    assert type(read_item(tmp_path / "r", "best")) is np.float64


def test_the_system_in_a_directory_is_refused(tmp_path):
    content = {"x": Called(os.system, (f"touch {tmp_path / 'executed'}",)), "w": torch.ones(3)}
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    assert "posix.system" in run("verify", tmp_path / "d", code=3).stderr
    run("convert", tmp_path / "d", tmp_path / "b.pt", code=3)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "b.pt").exists()


def flat(**options):
    return dcp.DefaultSavePlanner(flatten_state_dict=False, **options)


def nested():
    model, opt = optimizer()
    return {"model": model.state_dict(), "optim": opt.state_dict(), "x": torch.ones(3)}


DATA = {
    "nested dicts": (nested, flat, "model ("),
    "a tuple": (lambda: {"ema": (torch.ones(2), torch.zeros(2)), "x": torch.ones(3)}, dcp.DefaultSavePlanner, "ema ("),
    "a parameter": (lambda: {"ema": [(torch.nn.Parameter(torch.ones(2)), 1)], "x": torch.ones(3)}, dcp.DefaultSavePlanner, "ema ("),
    "a quantized one": (lambda: {"q": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "x": torch.ones(3)}, dcp.DefaultSavePlanner, "q ("),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_tensors_inside_a_value_are_not_left_out(tmp_path, name):
    """They are data: whoever converts and deletes the source would have lost them."""
    make, planner, said = DATA[name]
    dcp.save(make(), checkpoint_id=tmp_path / "d", planner=planner(), no_dist=True)
    for target in ("b.pt", "b.safetensors"):
        for also in ([], ["--dry-run"]):
            error = run("convert", tmp_path / "d", tmp_path / target, *also, code=3).stderr
            assert "holds tensors that are not read" in error and f": {said}" in error, error
            assert "--exclude" in error and "a directory as the target keeps them" in error
            assert not (tmp_path / target).exists()
    run("inspect", tmp_path / "d")
    only = ["--include", "x"]
    run("convert", tmp_path / "d", tmp_path / "x.pt", *only)
    assert list(torch.load(tmp_path / "x.pt")) == ["x"]
    # A directory has them as they were.
    run("convert", tmp_path / "d", tmp_path / "e")
    run("reshard", tmp_path / "d", tmp_path / "r", "--world-size", "2")
    item = said.split()[0]
    for path in ("e", "r"):
        assert str(read_item(tmp_path / path, item)) == str(read_item(tmp_path / "d", item))


def test_tensors_in_a_set_are_not_left_out(tmp_path):
    torch.save({"x": {torch.ones(2)}, "w": torch.ones(3)}, tmp_path / "a.pt")
    run("inspect", tmp_path / "a.pt")
    for target in ("b.pt", "d"):
        error = run("convert", tmp_path / "a.pt", tmp_path / target, "--container", "dcp" if target == "d" else "torch", code=3).stderr  # fmt: skip
        assert "not read" in error and ": x (" in error and not (tmp_path / target).exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "x")


LOST = {
    "both moments": [("state", 0, "exp_avg"), ("state", 0, "exp_avg_sq")],
    "one moment": [("state", 0, "exp_avg_sq")],
    "lr": [("param_groups", 0, "lr")],
    "one beta": [("param_groups", 0, "betas")],
    "parameters": [("param_groups", 0, "params")],
}


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("name", LOST)
def test_an_optimizer_does_not_go_on_without_its_state(tmp_path, name, container):
    _, opt = optimizer()
    content = {"optimizer": opt.state_dict(), "w": torch.ones(3)}
    for path in LOST[name]:
        place = content["optimizer"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = (0.9, Called()) if path[-1] == "betas" else Called()
    if container == "torch":
        torch.save(content, tmp_path / "a")
    else:
        dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    for to in ("lowbit", "torch"):
        error = run("convert", tmp_path / "a", tmp_path / "b.pt", "--to", to, code=3).stderr
        assert ".".join(map(str, LOST[name][0])) in error and "is opaque (json.loads)" in error
        assert "--exclude" in error and not (tmp_path / "b.pt").exists()


def test_what_an_optimizer_does_not_need_is_left_out(tmp_path):
    """An object that its user keeps in a group, and what only looks like an optimizer's state."""
    _, opt = optimizer()
    content = {"optimizer": opt.state_dict(), "trainer": {"state": {"epoch": {"args": Called()}}}}
    content["optimizer"]["param_groups"][0]["schedule"] = Called()
    torch.save(content, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    assert "schedule: is opaque" in done.stderr and "args: is opaque" in done.stderr
    assert len(torch.load(tmp_path / "b.pt")["optimizer"]["state"]) == 2
