"""Attributes of an OrderedDict: what a target cannot have of them is refused or said."""

import argparse
import collections

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.ckpt.archives import same
from tests.support.peers.files import need_tool, run

need_tool()

TARGETS = ["b.pt", "b.safetensors", "b"]


def save(tmp_path, **attributes):
    made = collections.OrderedDict(w=torch.zeros(2))
    vars(made).update(attributes)
    torch.save({"m": made, "v": torch.ones(3)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def convert(tmp_path, target, *more, code=0):
    """What it says; to a directory it is what reshard says too."""
    to_folder = "." not in target
    done = run(
        "convert",
        tmp_path / "a.pt",
        tmp_path / target,
        *(["--container", "dcp"] if to_folder else []),
        *more,
        code=code,
    )
    if to_folder:
        arguments = [tmp_path / "a.pt", tmp_path / "resharded", "--world-size", "1", *more]
        other = run("reshard", *arguments, code=code)
        assert other.stderr == done.stderr
    return done.stderr


DATA = {
    "tensor": torch.ones(2),
    "tensors": [torch.ones(2), 1],
    "sparse": torch.eye(2).to_sparse(),
    "object": argparse.Namespace(a=torch.ones(2)),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("target", TARGETS)
def test_tensors_in_attributes_are_not_left_out(tmp_path, name, target):
    save(tmp_path, _metadata=collections.OrderedDict(x=DATA[name], y=1))
    error = convert(tmp_path, target, code=3)
    assert "holds tensors that are not read" in error and ": m._metadata.x (" in error
    assert not (tmp_path / target).exists() and not (tmp_path / "resharded").exists()
    assert "matches nothing" not in convert(tmp_path, target, "--exclude", "m._metadata.x")
    if target == "b.pt":
        back = torch.load(tmp_path / target)["m"]
        assert back._metadata == {"y": 1} and back.keys() == {"w"}


def test_attributes_go_with_their_dict(tmp_path):
    save(tmp_path, _metadata=torch.ones(2))
    convert(tmp_path, "b.pt", "--exclude", "m.w")
    assert torch.load(tmp_path / "b.pt").keys() == {"v"}


def test_objects_in_attributes_are_left_out_with_a_warning(tmp_path):
    versions = collections.OrderedDict({"": {"version": 1, "who": argparse.Namespace()}})
    save(tmp_path, _metadata=versions, args=argparse.Namespace(), lr=0.1)
    for target in TARGETS:
        said = convert(tmp_path, target)
        assert "m._metadata..who: is opaque (argparse.Namespace) and is left out" in said
        assert "m.args: is opaque (argparse.Namespace) and is left out" in said
        assert ("attributes of OrderedDicts (m.lr) are left out" in said) == (target == "b")
    back = torch.load(tmp_path / "b.pt")["m"]
    assert vars(back) == {"_metadata": {"": {"version": 1}}, "lr": 0.1}
    assert load_file(tmp_path / "b.safetensors").keys() == {"m.w", "v"}
    run("convert", tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert vars(torch.load(tmp_path / "c.pt")["m"]) == vars(back)


def test_arrays_in_attributes_are_kept_where_they_can_be(tmp_path):
    save(tmp_path, mean=np.arange(3.0), eps=np.array(0.5))
    assert convert(tmp_path, "b.pt") == ""
    back = torch.load(tmp_path / "b.pt", weights_only=False)["m"]
    assert back.mean.tolist() == [0, 1, 2] and back.eps.shape == ()
    assert ": m.mean (" in convert(tmp_path, "b.safetensors", code=3)
    error = convert(tmp_path, "b", code=3)
    assert "arrays of numbers" in error and "m.mean (" in error and "m.eps (" in error
    convert(tmp_path, "b.safetensors", "--exclude", "m.mean")
    run("convert", tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert vars(torch.load(tmp_path / "c.pt")["m"]) == {"eps": 0.5}


def test_versions_of_modules_go_without_a_word(tmp_path):
    """Every module's state dict has them, and torch loads as well without."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    for target in TARGETS:
        assert convert(tmp_path, target) == ""
    same(torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt"))


def test_more_than_versions_is_named(tmp_path):
    save(tmp_path, _metadata={"": {"version": 1, "more": 2}})
    assert "(m._metadata) are left out: a directory keeps none" in convert(tmp_path, "b")


def test_verify_refuses_what_torch_would_run(tmp_path):
    source = save(tmp_path, _metadata={"": {"version": 1, "who": argparse.Namespace()}})
    error = run("verify", source, code=3).stderr
    assert "m._metadata..who: is opaque: argparse.Namespace, which torch would import" in error
    for more in (["--opaque"], ["--exclude", "m._metadata*"]):
        done = run("verify", source, *more)
        assert ("m._metadata..who: is opaque, not read" in done.stderr) == (more == ["--opaque"])
    save(tmp_path, data=torch.ones(2))
    assert (
        "m.data: is opaque: torch._utils._rebuild_tensor_v2" in run("verify", source, code=3).stderr
    )
