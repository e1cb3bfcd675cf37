"""Tensors without plain elements, and tensors under odd keys: named,
and no hindrance to the rest of a file.
"""

import argparse
import json
import warnings
from typing import NamedTuple

import pytest
import torch

from tests.ckpt.opaque.opaque_objects import optimizer
from tests.support.peers.files import need_tool, run

need_tool()


class Pair(NamedTuple):
    """A container that torch pickles with its class."""

    a: object
    b: object


class Own(torch.Tensor):
    """A class that torch pickles with its name alone."""


def quantized():
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def sharded():
    """As FSDP1's SHARDED_STATE_DICT is made of."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    return sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 4)


KINDS = {
    "coo": (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
    "quantized": (quantized, "a quantized tensor"),
    "by channel": (
        lambda: torch.quantize_per_channel(
            torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8
        ),
        "a quantized tensor",
    ),
    "nested": (lambda: nested(torch.strided), "a nested tensor"),
    "jagged": (lambda: nested(torch.jagged), "torch.nested._internal.nested_tensor.NestedTensor"),
    "meta": (lambda: torch.empty(3, device="meta"), "a meta tensor"),
    "conjugated": (
        lambda: torch.ones(2, dtype=torch.cfloat).conj(),
        "a conjugated or negated view",
    ),
    "negated": (
        lambda: torch.ones(2, dtype=torch.cfloat).conj().imag,
        "a conjugated or negated view",
    ),
    "bits": (lambda: torch.empty(4, dtype=torch.bits8), "a tensor of the dtype torch.bits8"),
    "class": (lambda: torch.ones(2).as_subclass(Own), "Own"),
    "parameter": (lambda: torch.nn.Parameter(torch.eye(3).to_sparse()), "a sparse tensor"),
}

KEYS = {"tuple": (1, "a"), "None": None, "device": torch.device("cpu"), "float": 1.5, "bytes": b"a"}


def save(content, path, legacy=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)


def check_rest(tmp_path, opt, name, shown):
    """Whatever `name` is, the rest of a.pt is read, checked and converted."""
    source = tmp_path / "a.pt"
    report = json.loads(run("inspect", source, "--json").stdout)
    assert report["dialect"] == "torch" and "model.weight" in json.dumps(report["tensors"])
    assert shown in report["values"][name] and "not read" in report["values"][name]
    assert not any("no tensor uses" in w for w in report["warnings"])
    error = run("verify", source, code=3).stderr
    assert name in error and shown in error and "--opaque" in error and "run" not in error
    run("verify", source, "--opaque")
    # It is data, which the user alone leaves out.
    for command in (["convert"], ["convert", "--to", "lowbit"], ["reshard", "--world-size", "2"]):
        error = run(command[0], source, tmp_path / "b", *command[1:], code=3).stderr
        assert f"not read, and the target would be without them: {name} (" in error
        assert shown in error and "--exclude" in error and not (tmp_path / "b").exists()
    without = ["--exclude", name]
    done = run("convert", source, tmp_path / "b.pt", "--to", "lowbit", *without)
    assert shown not in done.stderr
    run("convert", source, tmp_path / "c.pt", "--to", "torch", *without)
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    wanted = opt.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], wanted)
    assert list(back) == ["model", "optimizer"] or not back["x"]
    run("reshard", source, tmp_path / "r", "--world-size", "2", *without)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_read(tmp_path, kind, legacy):
    make, shown = KINDS[kind]
    model, opt = optimizer()
    content = {"model": model.state_dict(), "x": make(), "optimizer": opt.state_dict()}
    try:
        save(content, tmp_path / "a.pt", legacy)
    except Exception:
        assert legacy, "torch cannot save it in its old format alone"
        return
    check_rest(tmp_path, opt, "x", shown)


@pytest.mark.parametrize("key", KEYS)
def test_the_rest_is_read_beside_an_odd_key(tmp_path, key):
    model, opt = optimizer()
    given = {KEYS[key]: torch.ones(2)}
    save(
        {"model": model.state_dict(), "x": given, "optimizer": opt.state_dict()}, tmp_path / "a.pt"
    )
    report = json.loads(run("inspect", tmp_path / "a.pt", "--json").stdout)
    (name,) = [n for n in report["values"] if n.startswith("x.")]
    check_rest(tmp_path, opt, name, "neither text nor a whole number")


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [{"y": x}]], ids=["itself", "inside"])
def test_an_object_with_tensors_under_an_odd_key_is_data(tmp_path, wrap):
    """As under any other key, nothing leaves it out unasked."""
    save({"w": torch.ones(2), None: wrap(Pair(torch.ones(2), 1))}, tmp_path / "a.pt")
    for command in (["convert"], ["reshard", "--world-size", "2"]):
        error = run(command[0], tmp_path / "a.pt", tmp_path / "b", *command[1:], code=3).stderr
        assert "would be without them: None (" in error and "neither text nor" in error
        assert "--exclude" in error and not (tmp_path / "b").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "None")
    for held in ({torch.ones(2)}, torch.nn.Linear(2, 2)):
        save({"w": torch.ones(2), None: wrap(held)}, tmp_path / "a.pt")
        assert "None (" in run("convert", tmp_path / "a.pt", tmp_path / "c.pt", code=3).stderr
    save({"w": torch.ones(2), None: wrap(Pair(1, 1))}, tmp_path / "a.pt")
    assert "None: is opaque" in run("convert", tmp_path / "a.pt", tmp_path / "c.pt").stderr


@pytest.mark.parametrize("given", [{"x": argparse.Namespace()}, [argparse.Namespace()]])
def test_nothing_but_what_is_left_out_is_no_checkpoint(tmp_path, given):
    save(given, tmp_path / "a.pt")
    for more in ([], ["--container", "dcp"], ["--dry-run"]):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b", *more, code=3).stderr
        assert "nothing of it would be left to write" in error and "is left out" in error
    error = run("reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "2", code=3).stderr
    assert "nothing of it would be left to write" in error and not (tmp_path / "b").exists()


def test_plain_neighbours_of_an_odd_key_stay(tmp_path):
    save({"x": {None: torch.ones(2), "w": torch.ones(3), 1.5: 7}}, tmp_path / "a.pt")
    assert ": x.None (" in run("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=3).stderr
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "x.None")
    assert "x.1.5" in done.stderr
    assert list(torch.load(tmp_path / "b.pt")["x"]) == ["w"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_does_not_go_on_without_it(tmp_path, kind):
    _, opt = optimizer()
    content = {"optimizer": opt.state_dict()}
    content["optimizer"]["state"][0]["exp_avg"] = KINDS[kind][0]()
    save(content, tmp_path / "a.pt")
    run("inspect", tmp_path / "a.pt")
    for more in (["--to", "lowbit"], ["--to", "torch"], []):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", *more, code=3).stderr
        assert "optimizer.state.0.exp_avg: is opaque" in error and KINDS[kind][1] in error
        assert "cannot continue without it" in error and not (tmp_path / "b.pt").exists()
    error = run("reshard", tmp_path / "a.pt", tmp_path / "r", "--world-size", "2", code=3).stderr
    assert "optimizer.state.0.exp_avg: is opaque" in error and not (tmp_path / "r").exists()


def test_state_under_an_odd_key(tmp_path):
    _, opt = optimizer()
    content = {"optimizer": opt.state_dict()}
    content["optimizer"]["state"][(1, 2)] = {"exp_avg": torch.ones(3)}
    save(content, tmp_path / "a.pt")
    for more in (["--to", "lowbit"], []):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", *more, code=3).stderr
        assert "optimizer.state.(1, 2): is opaque" in error and not (tmp_path / "b.pt").exists()


def test_hostile_ones_stay_refused(tmp_path):
    """A kind that is known names what is wrong with it: no file is taken for the rest of
    another.
    """
    from struct import pack
    from zipfile import ZIP_STORED, ZipFile

    save({"x": torch.ones(2), "w": torch.ones(3)}, tmp_path / "good.pt")
    with ZipFile(tmp_path / "good.pt") as z:
        records = {i.filename.split("/", 1)[1]: z.read(i) for i in z.infolist()}
    pickle = records["data.pkl"]
    cases = {
        "negative": pickle.replace(b"K\x02\x85", b"J" + pack("<i", -2) + b"\x85", 1),
        "beyond its record": pickle.replace(b"K\x02\x85", b"K\x03\x85", 1),
        "outside the allowlist": pickle.replace(
            b"ctorch._utils\n_rebuild_tensor_v2\n", b"cos\nsystem\n", 1
        ),
    }
    for words, changed in cases.items():
        assert changed != pickle
        with ZipFile(tmp_path / "a.pt", "w", ZIP_STORED) as z:
            for name, content in {**records, "data.pkl": changed}.items():
                z.writestr("good/" + name, content)
        assert words in run("inspect", tmp_path / "a.pt", code=3).stderr


def test_one_rank_of_a_sharded_tensor(tmp_path):
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        save({"model": {"w": sharded()}, "n": torch.ones(2)}, tmp_path / "a.pt")
    finally:
        distributed.destroy_process_group()
    assert "ShardedTensor" in run("inspect", tmp_path / "a.pt").stdout
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=3).stderr
    assert "model.w" in error and "dcp.save" in error and not (tmp_path / "b.pt").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "model.w")
