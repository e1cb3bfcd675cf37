"""`lowbit-ckpt diff` of what is not a tensor: numbers, settings of groups,
and what only one of two files has.
"""

import numpy as np
import pytest
import torch

from lowbit import checkpoint
from lowbit.checkpoint import native
from tests.support.require import need

need(
    "ckpt",
    native._checkpoint is not None,
    "lowbit was built without its checkpoint module",
    module=True,
)

NAN = float("nan")


def differences(first, second, tmp_path, bytes):
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    for path, content in zip(paths, (first, second), strict=True):
        torch.save(content, path)
    report = checkpoint.diff(*paths, bytes=bytes)
    return {entry["name"]: entry["what"] for entry in report["differences"]}


@pytest.mark.parametrize("bytes", [False, True])
def test_a_number_that_is_none_equals_itself(tmp_path, bytes):
    """The best loss before the first evaluation, alone and inside what is one value."""
    content = {"best": NAN, "history": [1.0, NAN], "pair": (NAN, {"a": NAN}), "w": torch.ones(2)}
    assert differences(content, content, tmp_path, bytes) == {}
    other = content | {"best": 1.0, "history": [NAN, 1.0]}
    assert set(differences(content, other, tmp_path, bytes)) == {"best", "history"}


@pytest.mark.parametrize("bytes", [False, True])
@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: (n, 1)], ids=["alone", "in a tuple"])
def test_large_integers_that_are_one_apart(tmp_path, bytes, wrap):
    """A double holds neither exactly."""
    first, second = ({"seed": wrap(2**62 + i), "w": torch.ones(2)} for i in range(2))
    assert differences(first, second, tmp_path, bytes) == {"seed": "has another value"}
    for n in (3, 2**62):
        assert differences({"n": n}, {"n": float(n)}, tmp_path, bytes) == {}


@pytest.mark.parametrize("bytes", [False, True])
def test_a_set_has_no_order(tmp_path, bytes):
    """Python pickles its items by their hashes, which differ from run to run."""
    first = {"names": {8, 16}, "w": torch.ones(2)}
    second = {"names": {16, 8}, "w": torch.ones(2)}
    assert list(first["names"]) != list(second["names"])
    assert differences(first, second, tmp_path, bytes) == {}
    assert differences(first, second | {"names": {8, 17}}, tmp_path, bytes) != {}


def test_an_array_of_no_dimensions_is_its_number_by_meaning(tmp_path):
    """safetensors keeps it as one."""
    content = {"x": np.array(2.5), "y": [1, np.array(3)], "w": torch.ones(2)}
    torch.save(content, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert checkpoint.diff(tmp_path / "a.pt", tmp_path / "a.safetensors")["same"]
    report = checkpoint.diff(tmp_path / "a.pt", tmp_path / "a.safetensors", bytes=True)
    assert [entry["name"] for entry in report["differences"]] == ["x", "y"]
    assert differences(content, content | {"x": 2.0}, tmp_path, bytes=False) == {
        "x": "has another value"
    }


@pytest.mark.parametrize("bytes", [False, True])
def test_what_differs_beside_an_infinity(tmp_path, bytes):
    """The norm of both is infinite, beside which no difference would count."""
    first = torch.ones(8, 8)
    first[0, 0] = float("inf")
    second = first.clone()
    assert differences({"w": first}, {"w": second}, tmp_path, bytes) == {}
    second[3] += 5
    found = differences({"w": first}, {"w": second}, tmp_path, bytes)
    assert found == {"w": "8 of 64 elements differ, the first at [3, 0]"}


def test_states_of_another_shape_differ(tmp_path):
    first, second = (optimizer() for _ in range(2))
    for key in ("exp_avg", "exp_avg_sq"):
        second["state"][0][key] = second["state"][0][key].reshape(-1)
    found = differences(first, second, tmp_path, bytes=False)
    assert list(found.values()) == ["has the shape [96, 64] in the first, [6144] in the second"] * 2


def optimizer(**settings):
    model = torch.nn.Linear(64, 96)
    opt = torch.optim.AdamW(model.parameters(), **settings)
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return opt.state_dict()


def test_what_only_one_of_two_optimizers_has(tmp_path):
    """A rate, and a number in the state: lost on the way, and by meaning no less than by bytes.
    Options that are off are those of later versions.
    """
    whole, less = optimizer(), optimizer()
    for state in whole["state"].values():
        state["seen"] = 7
    del less["param_groups"][0]["lr"], less["param_groups"][0]["foreach"]
    del less["param_groups"][0]["capturable"]
    found = differences(whole, less, tmp_path, bytes=False)
    names = ["parameter 0.seen", "parameter 1.seen", "param_groups.0.lr"]
    assert found == dict.fromkeys(names, "is only in the first")
    found = differences(less, whole, tmp_path, bytes=False)
    assert found == dict.fromkeys(names, "is only in the second")
    report = checkpoint.diff(tmp_path / "a.pt", tmp_path / "b.pt", exclude=["*.seen", "*.lr"])
    assert report["same"]
    checkpoint.convert(tmp_path / "b.pt", tmp_path / "c.pt", to="lowbit", state_format="float32")
    assert checkpoint.diff(tmp_path / "b.pt", tmp_path / "c.pt")["same"]  # another dialect


def test_options_of_later_versions_are_no_difference_where_they_are_usual(tmp_path):
    """torch 2.6 writes no decoupled_weight_decay, which is True for AdamW. Where it is False,
    the update is another.
    """
    new, old = optimizer(), optimizer()
    assert new["param_groups"][0]["decoupled_weight_decay"] is True
    del old["param_groups"][0]["decoupled_weight_decay"]
    assert differences(old, new, tmp_path, bytes=False) == {}
    assert differences(new, old, tmp_path, bytes=False) == {}
