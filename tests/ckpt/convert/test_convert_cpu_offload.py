"""torchao's CPUOffloadOptimizer: an optimizer for each large parameter, read as one for all. The
files are those of its own code (tests/golden/cpu_offload/make.py)."""

import json
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from lowbit import checkpoint
from tests.golden.cpu_offload import make
from tests.support.peers.files import need_tool, run

need_tool()
GOLDEN = pathlib.Path(make.__file__).with_name("state_dicts.pt")


@pytest.fixture
def kept():
    return torch.load(GOLDEN, weights_only=True)


def assert_same_state(made, expected):
    """`expected`: the state dict of AdamW over the same parameters and gradients."""
    assert list(made["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        for name, tensor in state.items():
            assert torch.equal(made["state"][number][name], tensor), (number, name)
    for group, other in zip(made["param_groups"], expected["param_groups"], strict=True):
        for name in ("params", "lr", "betas", "eps", "weight_decay"):
            assert group[name] == other[name], name


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_parameters_of_equal_settings_are_one_group(tmp_path, kept, container):
    content = {"model": kept["model"], "optim": kept["groups"]}
    source, target = tmp_path / "a", tmp_path / "b.pt"
    if container == "torch":
        torch.save(content, source)
    else:
        dcp.save(content, checkpoint_id=source)
    report = json.loads(run("inspect", source, "--json").stdout)
    assert (report["dialect"], report["algorithm"], report["steps"]) == ("torch", "adam", [2])
    assert [g["parameters"] for g in report["groups"]] == [2, 3]
    assert "torchao's CPUOffloadOptimizer, with 5 offloaded" in "".join(report["warnings"])
    run("verify", source)
    run("convert", source, target, "--to", "torch")
    made = torch.load(target, weights_only=True)
    assert torch.equal(made["model"]["0.weight"], kept["model"]["0.weight"])
    assert_same_state(made["optim"], kept["plain_groups"])
    optimizer = torch.optim.AdamW(make.groups(make.model()))
    optimizer.load_state_dict(made["optim"])


def test_small_parameters_get_their_places_from_the_model(tmp_path, kept):
    torch.save(kept["mixed"], tmp_path / "a.pt")
    torch.save(kept["model"], tmp_path / "model.pt")
    said = run("inspect", tmp_path / "a.pt").stdout
    assert "CPUOffloadOptimizer with 2 offloaded parameters and 3 on the device" in said
    convert = ["convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch"]
    assert "--model" in run(*convert, code=3).stderr
    model = ["--model", tmp_path / "model.pt"]
    run(*convert, *model)
    made = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same_state(made, kept["plain"])
    assert made["param_groups"][0]["param_names"] == list(kept["model"])
    run("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "lowbit", *model)
    # Another model, whose sizes do not tell which parameters are large.
    torch.save({f"{9 - i}.w": torch.zeros(96) for i in range(5)}, tmp_path / "model.pt")
    assert "more of that size" in run(*convert, "--force", *model, code=3).stderr


def test_what_no_file_tells_is_refused(tmp_path, kept):
    torch.save(kept["mixed_groups"], tmp_path / "a.pt")
    torch.save(kept["model"], tmp_path / "model.pt")
    convert = ["convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch"]
    said = run(*convert, "--model", tmp_path / "model.pt", code=3).stderr
    assert "groups of several settings" in said and "--optimizer" in said
    run(*convert, "--optimizer", "offloaded.1")
    kept["groups"]["offloaded"][3] = kept["plain"]
    torch.save(kept["groups"], tmp_path / "a.pt")
    said = run(*convert, "--force", code=3).stderr
    assert "offloaded.3 has 5 parameters" in said


class Unread:
    """Of a program that the tool does not know."""


def test_a_moment_that_cannot_be_read_is_refused_by_either_name(tmp_path, kept):
    """Whether the path around all of them is named or not."""
    kept["groups"]["offloaded"][0]["state"][0]["exp_avg"] = Unread()
    torch.save({"optim": kept["groups"]}, tmp_path / "a.pt")
    for more in ([], ["--optimizer", "optim"], ["--optimizer", "optim.offloaded.0"]):
        said = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch", *more, code=3)
        assert "optim.offloaded.0.state.0.exp_avg: is opaque" in said.stderr
    other = ["--to", "torch", "--optimizer", "optim.offloaded.1"]
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", *other)


@pytest.mark.usefixtures("ckpt")
def test_a_live_optimizer_takes_them_as_one(tmp_path, kept):
    torch.save({"optim": kept["groups"]}, tmp_path / "a.pt")
    assert checkpoint.Checkpoint(tmp_path / "a.pt").optimizers == ["optim"]
    opt = lowbit.AdamW(make.groups(make.model()), state_format="float32")
    lowbit.load_optimizer(opt, tmp_path / "a.pt")
    params = [p for group in opt.param_groups for p in group["params"]]
    for number, p in enumerate(params):
        wanted = kept["plain_groups"]["state"][number]
        assert torch.equal(opt.state[p]["exp_avg"], wanted["exp_avg"])
        assert torch.equal(opt.state[p]["exp_avg_sq"], wanted["exp_avg_sq"])
    one = checkpoint.Checkpoint(tmp_path / "a.pt", optimizer="optim.offloaded.1")
    assert len(one.optimizers) == 5 and len(one.params) == 1
