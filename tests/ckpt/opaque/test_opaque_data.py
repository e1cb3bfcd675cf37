"""Data inside objects: tensors in containers of other classes, and what arrays may unfold to."""

import collections
import json

import numpy as np
import pytest
import torch

from tests.ckpt.opaque.opaque_objects import optimizer
from tests.support.peers.files import need_tool, run

need_tool()


class Listed(list):
    pass


class Ordered(collections.OrderedDict):
    """As a library's own class of state dicts."""


class Trainer:
    """An object whose attributes lead to tensors, deep down and in a circle."""

    def __init__(self, data, depth=0):
        self.trainer, self.data = self, data
        for _ in range(depth):
            self.data = {"below": [self.data]}

    def step(self):
        return self.data


Averages = collections.namedtuple("Averages", "step weight")


HOLDERS = {
    "namedtuple": (lambda: Averages(1, torch.ones(2)), "Averages"),
    "state dict of a class": (lambda: Ordered(torch.nn.Linear(2, 2).state_dict()), "Ordered"),
    "list of a class": (lambda: Listed([1, torch.ones(2)]), "Listed"),
    "deque": (lambda: collections.deque([1, torch.ones(2)], maxlen=4), "collections.deque"),
    "return type": (lambda: torch.ones(2, 2).max(0), "torch.return_types.max"),
    "deeper": (lambda: Averages(1, {"a": [Averages(2, torch.ones(2))]}), "Averages"),
    "attribute": (lambda: Trainer(torch.ones(2)), "Trainer"),
    "deep attribute": (lambda: Trainer(torch.ones(2), 40), "Trainer"),
    "attribute of an attribute": (lambda: Trainer(Trainer({1: torch.ones(2)})), "Trainer"),
    "buffer": (lambda: torch.nn.BatchNorm1d(2, affine=False), "BatchNorm1d"),
    "optimizer": (lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), "SGD"),
    "method": (lambda: Trainer(torch.ones(2)).step, "Trainer"),
    "sparse": (lambda: Trainer(torch.eye(2).to_sparse()), "Trainer"),
    "storage": (lambda: Trainer(torch.ones(2).untyped_storage()), "Trainer"),
    "set": (lambda: Trainer({torch.ones(2)}), "Trainer"),
    "bare storage": (lambda: torch.ones(2).untyped_storage(), "a storage"),
    "storages in a list": (lambda: [1, torch.ones(2).untyped_storage()], "a storage"),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", HOLDERS)
def test_containers_of_tensors_are_not_left_out(tmp_path, name, legacy):
    """A model in a dict of its own class is data: whoever deletes the source would have lost it."""
    make, cls = HOLDERS[name]
    model, opt = optimizer()
    content = {"model": model.state_dict(), "args": make(), "optimizer": opt.state_dict()}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    assert cls in run("inspect", tmp_path / "a.pt").stdout
    for more in ([], ["--to", "lowbit"], ["--container", "dcp"]):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b", *more, code=3).stderr
        assert "holds tensors that are not read" in error and ": args (" in error
        assert cls in error and "--exclude" in error
    run("reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "2", code=3)
    assert not (tmp_path / "b").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch", "--exclude", "args")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(
        back["optimizer"]["state"][0]["exp_avg"], opt.state_dict()["state"][0]["exp_avg"]
    )


def test_the_first_few_that_would_be_lost_are_named(tmp_path):
    """In one error, with the option that leaves them out; what holds no tensors stays a warning."""
    _, opt = optimizer()
    content = {
        "optimizer": opt.state_dict(),
        "plain": Trainer([1]),
        "eye": torch.eye(2).to_sparse(),
    }
    content["models"] = {str(i): torch.nn.Linear(2, 2) for i in range(6)}
    torch.save(content, tmp_path / "a.pt")
    for more in ([], ["--to", "lowbit"], ["--dry-run"]):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", *more, code=3).stderr
        assert (
            "eye (a sparse tensor), models.0 (torch.nn.modules.linear.Linear), models.1 (" in error
        )
        assert " and 2 more; --exclude PATTERN leaves them out" in error and "plain" not in error
        assert not (tmp_path / "b.pt").exists()
    given = ["--exclude", "models.*", "--exclude", "eye", "--to", "lowbit"]
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", *given)
    assert "plain: is opaque" in done.stderr and "models" not in done.stderr
    assert set(torch.load(tmp_path / "b.pt")) == {"optimizer"}
    # Verify says what to do about each.
    error = run("verify", tmp_path / "a.pt", "--include", "models.0", code=3).stderr
    assert "--exclude leaves it out" in error


def test_one_array_many_times(tmp_path):
    """A file of a megabyte must not unfold to the memory of a machine: what is too much is named,
    and no hindrance to the rest.
    """
    big = np.zeros(1 << 20, dtype=np.uint8)
    torch.save({"x": {str(i): big for i in range(4000)}, "w": torch.ones(2)}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 4 << 20
    (tensor,) = json.loads(run("inspect", tmp_path / "a.pt", "--json").stdout)["tensors"]
    assert tensor["name"] == "w"
    run("verify", tmp_path / "a.pt", "--opaque")
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=3)
    assert "x.5 (numpy.ndarray uint8 [1048576])" in done.stderr and "--exclude" in done.stderr
    assert not (tmp_path / "b.pt").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "x.*")
    assert (tmp_path / "b.pt").stat().st_size < 16 << 20
    assert torch.equal(torch.load(tmp_path / "b.pt", weights_only=True)["w"], torch.ones(2))
    torch.save({"x": [np.arange(600)] * 20, "w": torch.ones(2)}, tmp_path / "a.pt")
    run("inspect", tmp_path / "a.pt")
