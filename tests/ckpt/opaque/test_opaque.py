"""Objects of classes that are not on the allowlist: named, never built,
and no hindrance to the rest of the file.
"""

import argparse
import collections
import datetime
import enum
import functools
import json
import os
import pathlib
import pickle
import re
import subprocess

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.opaque.opaque_objects import Called, optimizer
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

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
    """Rebuilt by a method of another class."""

    def __reduce__(self):
        return Config.made, (1,)


class Mode(enum.Enum):
    FAST = "fast"


class Named(enum.Enum):
    """A member is pickled by its name, as Python 3.11.2 does to every enum's."""

    FAST = "fast"

    def __reduce_ex__(self, protocol):
        return getattr, (self.__class__, self.name)


class Listed(list):
    pass


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
    "partial": (
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "functools.partial",
    ),
    "deque": (collections.deque([1, 2], maxlen=4), "collections.deque"),
    "range": (range(5), "range"),
    "pattern": (re.compile("a+"), "re._compile"),
    "iterator": (iter([1, 2]), "iter"),
    "RandomState": (np.random.RandomState(0), "numpy.random._pickle"),
    "Generator": (np.random.default_rng(0), "numpy.random._pickle"),
    "method": (Config().method, "Config"),
    "made by a method": (Made(), "Config"),
    "schedule": ({"lr_lambdas": [max, abs]}, "max"),
}
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
        error = run(
            "convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3
        ).stderr
        assert "holds tensors that are not read" in error and "--exclude" in error
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", *rest)
    assert ("warning: args" in done.stderr and "is left out" in done.stderr) == (not rest)
    run("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "torch", *rest)
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(
        back["optimizer"]["state"][0]["exp_avg"], opt.state_dict()["state"][0]["exp_avg"]
    )
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


def test_tensors_in_a_set_are_not_left_out(tmp_path):
    torch.save({"x": {torch.ones(2)}, "w": torch.ones(3)}, tmp_path / "a.pt")
    run("inspect", tmp_path / "a.pt")
    for target in ("b.pt", "d"):
        error = run(
            "convert",
            tmp_path / "a.pt",
            tmp_path / target,
            "--container",
            "dcp" if target == "d" else "torch",
            code=3,
        ).stderr
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
