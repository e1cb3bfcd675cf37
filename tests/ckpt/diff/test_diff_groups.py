"""`lowbit-ckpt diff` of param groups: which parameters each has, in which order where they are
numbered, and settings that are tensors.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.peers.files import need_tool, run

need_tool()


def groups_of(model, kind):
    weights = [(n, p) for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [(n, p) for n, p in model.named_parameters() if n.endswith("bias")]
    plain = kind == "numbered"
    take = [[p for _, p in group] if plain else group for group in (weights, biases)]
    return [{"params": take[0]}, {"params": take[1], "weight_decay": 0.0}]


def stepped(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    opt = torch.optim.AdamW(groups_of(model, kind))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return get_optimizer_state_dict(model, opt) if kind == "by name" else opt.state_dict()


def differences(tmp_path, first, second, *options, container="torch"):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, content in zip(paths, (first, second), strict=True):
        if container == "torch":
            torch.save({"optim": content}, path)
        else:
            dcp.save({"optim": content}, checkpoint_id=path, no_dist=True)
    done = run("diff", *paths, *options, code=4 if first is not second else 0)
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["numbered", "numbered with names", "by name"])
def test_a_parameter_in_another_group(tmp_path, kind):
    """It would get the other group's weight decay from then on."""
    whole = stepped(kind)
    moved = copy.deepcopy(whole)
    groups = moved["param_groups"]
    for key in ("params", "param_names"):
        if key in groups[0]:
            groups[1][key].append(groups[0][key].pop())
    name = "parameter 1" if kind == "numbered" else "1.weight"
    found = differences(tmp_path, whole, moved)
    assert found == [
        f"param_groups.0.params: holds other parameters in the second, and there not {name}",
        f"param_groups.1.params: holds other parameters in the second, and only there {name}",
    ]
    assert differences(tmp_path, whole, whole) == ["the same, by meaning"]
    torch.save({"optim": moved}, tmp_path / "b")
    torch.save({"optim": whole}, tmp_path / "a")
    run("diff", tmp_path / "a", tmp_path / "b", "--exclude", "param_groups.*")


@pytest.mark.parametrize("kind", ["numbered", "numbered with names"])
def test_numbers_in_another_order(tmp_path, kind):
    """torch gives the state of the first number to the first parameter."""
    whole = stepped(kind)
    swapped = copy.deepcopy(whole)
    for key in ("params", "param_names"):
        if key in swapped["param_groups"][0]:
            swapped["param_groups"][0][key].reverse()
    (line,) = differences(tmp_path, whole, swapped)
    first, second = (
        ("parameter 0", "parameter 1") if kind == "numbered" else ("0.weight", "1.weight")
    )
    assert line == (
        "param_groups.0.params: are in another order, by which torch loads the state: at place 0 "
        f"is {first} in the first and {second} in the second"
    )


def test_names_have_no_order(tmp_path):
    """dcp.load finds the state by name."""
    whole = stepped("by name")
    swapped = copy.deepcopy(whole)
    swapped["param_groups"][0]["params"].reverse()
    for path, content in {"a": whole, "b": swapped}.items():
        dcp.save({"optim": content}, checkpoint_id=tmp_path / path, no_dist=True)
    assert run("diff", tmp_path / "a", tmp_path / "b").stdout == "the same, by meaning\n"


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("kind", ["numbered", "by name"])
def test_a_setting_that_is_a_tensor(tmp_path, kind, container):
    whole = stepped(kind)
    whole["param_groups"][1]["scales"] = torch.arange(3.0)
    whole["param_groups"][1]["own"] = {"deep": torch.arange(4.0)}
    other, less = copy.deepcopy(whole), copy.deepcopy(whole)
    other["param_groups"][1]["scales"][1] = 7
    del less["param_groups"][1]["own"]
    assert differences(tmp_path, whole, whole, container=container) == ["the same, by meaning"]
    (line,) = differences(tmp_path, whole, other, container=container)
    assert line.startswith("param_groups.1.scales: 1 of 3 elements differ, the first at [1]")
    assert differences(tmp_path, whole, less, container=container) == [
        "param_groups.1.own.deep: is only in the first"
    ]
    run("diff", tmp_path / "a", tmp_path / "b", "--exclude", "*.own.*")


def test_a_setting_that_is_a_tensor_in_flat_names(tmp_path):
    """torch's flatten_optimizer_state_dict repeats every setting for each parameter."""
    names = ("0.weight", "1.weight")
    flat = {}
    for name in names:
        flat[f"state.{name}.exp_avg"] = torch.ones(64, 64)
        flat[f"state.{name}.exp_avg_sq"] = torch.ones(64, 64)
        flat[f"state.{name}.step"] = torch.tensor(1.0)
        flat[f"param_groups.{name}.lr"] = 0.1
        flat[f"param_groups.{name}.scales"] = torch.arange(3.0)
    other = copy.deepcopy(flat)
    other["param_groups.1.weight.scales"][2] = 7
    assert differences(tmp_path, flat, flat) == ["the same, by meaning"]
    (line,) = differences(tmp_path, flat, other)
    assert line.startswith("param_groups.0.1.weight.scales: 1 of 3 elements differ")
