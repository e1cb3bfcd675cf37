"""Megatron-Core's optimizers whose layout differs: the common state as an item of the directory,
several optimizers without a prefix, NeMo's list of one, and Megatron-FSDP's settings by parameter.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from tests.support.files.megatron import GROUP, SHAPES, groups, numbers, tensors, write
from tests.support.peers.files import need_tool, run

need_tool()
STATE = "optimizer.state."
ITEM = "common_state/shard_0_1"


def converted(source, target, *options, code=0):
    done = run("convert", source, target, "--to", "torch", "--force", *options, code=code)
    return done.stderr if code else torch.load(target, weights_only=True)


def check_numbers(made):
    for name in SHAPES:
        state = made["optimizer"]["state"][name]
        assert torch.equal(state["exp_avg"], numbers(name, "exp_avg"))
        assert torch.equal(made[name], numbers(name, "param")) and float(state["step"]) == 3


def test_the_common_state_is_an_item(tmp_path):
    """From 0.19 on; it is as good as common.pt, and a directory that is written keeps it."""
    said = {"optimizer": {"param_groups": list(groups(weight_decay=0.0).values())}}
    source = write(tmp_path / "m", tensors(), said, common="item")
    run("verify", "--opaque", source)  # of the run's arguments, as real ones
    out = tmp_path / "out.pt"
    assert "weight_decay differs between the groups (0.1, 0.0)" in converted(source, out, code=3)
    made = converted(source, out, "--group", "1=*.bias")
    check_numbers(made)
    assert [g["weight_decay"] for g in made["optimizer"]["param_groups"]] == [0.1, 0.0]
    assert not [key for key in made if "common" in key]
    for command, options in {"reshard": ["--world-size", "2"], "convert": []}.items():
        done = run(command, source, tmp_path / command, *options)
        assert "metadata.json is left out" in done.stdout + done.stderr
        again = converted(tmp_path / command, tmp_path / "again.pt", "--group", "1=*.bias")
        assert again["optimizer"]["param_groups"] == made["optimizer"]["param_groups"]
    for options in ([tmp_path / "x.pt"], [tmp_path / "x", "--exclude", "common_state*"]):
        error = run("convert", source, *options, code=3).stderr
        assert f"steps and settings are in {ITEM}" in error and "--to torch" in error
    opt = lowbit.AdamW([(n, torch.nn.Parameter(torch.ones(s))) for n, s in SHAPES.items()])
    said = {"param_groups": groups()}
    lowbit.load_optimizer(opt, write(tmp_path / "l", tensors(), said, common="item"))
    assert [float(s["step"]) for s in opt.state.values()] == [3, 3, 3]


def test_an_item_of_that_name_may_be_another_s(tmp_path):
    """Only a list of one dict is Megatron-Core's; it is parsed, and nothing in it is executed."""
    for value in ([1, 2], [[{"a": 1}]], [{"a": 1}, {"b": 2}], {"optimizer": {"a": 1}}):
        folder = tmp_path / str(value)
        dcp.save({ITEM: value, "w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
        run("inspect", folder)
        run("verify", folder)
    alone = write(tmp_path / "m", tensors(), None, common=None)
    assert f"in the item {ITEM}, and neither can be read" in converted(
        alone, tmp_path / "o", code=3
    )


def chain(*inner):
    """What a common state has of several optimizers."""
    return {
        number: {"optimizer": {"param_groups": list(of)}, "param_state_sharding_type": "x"}
        for number, of in enumerate(inner)
    }


def test_experts_without_a_prefix(tmp_path):
    """Dense parameters and experts have optimizers of their own, and names do not tell which."""
    first, second = groups(), {0: {**groups()[0], "is_expert_parallel": True}}
    source = write(tmp_path / "m", tensors("param"), chain(first.values(), second.values()))
    made = converted(source, tmp_path / "out.pt")
    check_numbers(made)
    (group,) = made["optimizer"]["param_groups"]
    assert group["lr"] == 0.01 and "is_expert_parallel" not in group
    second[0]["lr"] = 0.5
    other = write(tmp_path / "o", tensors("param"), chain([first[0]], second.values()))
    assert "lr differs between the groups (0.01, 0.5)" in converted(other, tmp_path / "o", code=3)
    made = converted(other, tmp_path / "out.pt", "--group", "1=fc1*")["optimizer"]
    assert [(g["lr"], len(g["params"])) for g in made["param_groups"]] == [(0.01, 1), (0.5, 2)]
    for lost in ("exp_avg_sq.fc1.bias", "exp_avg.embedding.weight", "param.fc1.weight"):
        content = tensors("param")
        del content[STATE + lost]
        broken = write(tmp_path / lost, content, chain(first.values(), second.values()))
        assert "the checkpoint is not whole" in converted(broken, tmp_path / "x.pt", code=3)


@pytest.mark.parametrize("prefixed", [True, False])
def test_muon_counts_no_steps(tmp_path, prefixed):
    """Its steps are Adam's. Without a prefix its tensors lie among Adam's: --group tells whose."""
    content = {}
    for number, of in enumerate((["fc1.weight"], ["embedding.weight", "fc1.bias"])):
        content |= tensors(prefix=f"chained_{number}." if prefixed else "", of=of)
    muon = ("chained_0." if prefixed else "") + STATE
    del content[muon + "exp_avg_sq.fc1.weight"]
    content[muon + "momentum_buffer.fc1.weight"] = content.pop(muon + "exp_avg.fc1.weight")
    settings = {k: v for k, v in GROUP.items() if k not in ("betas", "eps")}
    settings |= {"momentum_beta": 0.95, "use_nesterov": True, "use_decoupled_wd": True}
    source = write(tmp_path / "m", content, chain([settings], [groups()[0]]))
    out = tmp_path / "out.pt"
    if not prefixed:
        error = converted(source, out, code=3)
        assert "momentum_beta is not in all groups" in error and "--group N=PATTERN" in error
    made = converted(source, out, *([] if prefixed else ["--group", "0=fc1.weight"]))["optimizer"]
    assert {float(state["step"]) for state in made["state"].values()} == {3}
    assert torch.equal(
        made["state"]["fc1.weight"]["momentum_buffer"], numbers("fc1.weight", "exp_avg")
    )


@pytest.mark.parametrize("inner", [False, True])
def test_nemo_s_list_of_one(tmp_path, inner):
    """NeMo 2 keeps the optimizer's state in a list, and in it several optimizers by number."""
    one = chain(groups().values(), [groups()[0]])
    source = write(tmp_path / "m", tensors("param"), [one if inner else one[0]])
    check_numbers(converted(source, tmp_path / "out.pt"))


def test_settings_of_megatron_fsdp_are_not_read(tmp_path):
    """They are of each parameter, under names that need not be those of its state."""
    content = {
        "model": {name: numbers(name, "param") for name in SHAPES},
        "optimizer": {
            "state": {
                name: {s: numbers(name, s) for s in ("exp_avg", "exp_avg_sq")} for name in SHAPES
            },
            "param_to_group_meta": {name: {**GROUP, "step": 3} for name in SHAPES},
        },
    }
    dcp.save(content, checkpoint_id=tmp_path / "m", no_dist=True)
    error = converted(tmp_path / "m", tmp_path / "out.pt", code=3)
    assert "fsdp_dtensor" in error and "optimizer.param_to_group_meta, which is not read" in error
    made = converted(tmp_path / "m", tmp_path / "out.pt", "--exclude", "*param_to_group_meta*")
    assert torch.equal(
        made["optimizer"]["state"]["fc1.bias"]["exp_avg"], numbers("fc1.bias", "exp_avg")
    )
    run("reshard", tmp_path / "m", tmp_path / "r", "--world-size", "2")
