"""Objects of classes that are not on the allowlist in directories,
where each value is a file of torch.save of its own.
"""

import argparse
import io
import json
import os

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.opaque.opaque_objects import Called, optimizer, same
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


ITEMS = {
    "namespace": (argparse.Namespace(lr=0.1), "argparse.Namespace"),
    "call": (Called(), "json.loads"),
    "array": (np.arange(4.0), "numpy.ndarray float64 [4]"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_in_a_directory(tmp_path, name):
    given, cls = ITEMS[name]
    _, opt = optimizer()
    content = {
        "args": given,
        "w": torch.ones(3),
        "optimizer": opt.state_dict(),
        "list": [torch.ones(1), given],
    }
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
    if name == "array":  # safetensors has no place for it
        refused = run("convert", tmp_path / "d", tmp_path / "s.safetensors", code=3).stderr
        assert f"args ({cls})" in refused and not (tmp_path / "s.safetensors").exists()
    left_out = ("--exclude", "args", "--exclude", "list.1") if name == "array" else ()
    run("convert", tmp_path / "d", tmp_path / "s.safetensors", *left_out)
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
    "a tuple": (
        lambda: {"ema": (torch.ones(2), torch.zeros(2)), "x": torch.ones(3)},
        dcp.DefaultSavePlanner,
        "ema (",
    ),
    "a parameter": (
        lambda: {"ema": [(torch.nn.Parameter(torch.ones(2)), 1)], "x": torch.ones(3)},
        dcp.DefaultSavePlanner,
        "ema (",
    ),
    "a quantized one": (
        lambda: {
            "q": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
            "x": torch.ones(3),
        },
        dcp.DefaultSavePlanner,
        "q (",
    ),
}


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
