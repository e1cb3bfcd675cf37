"""Optimizers whose states have the names of another's, known by the settings of their groups. The
keys are those of timm 1.0, Apex, DeepSpeed 0.19, schedulefree 1.4, transformers 4 and
pytorch_optimizer 3."""

import json
import re

import pytest
import torch

import lowbit
from tests.support.peers.files import convert, need_tool, run

need_tool()
SHAPE = (64, 64)
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
LAMB = {**ADAM, "bias_correction": True, "grad_averaging": True, "max_grad_norm": 1.0}
FREE = {"lr": 1.0, "r": 0.0, "k": 7, "warmup_steps": 0, "train_mode": True, "weight_sum": 2.0}
FREE |= {"lr_max": 1.0, "scheduled_lr": 1.0, "weight_lr_power": 2.0, "weight_decay": 0.0}
SGD = {"lr": 1.0, "momentum": 0.9, "dampening": 0, "weight_decay": 0.1, "nesterov": False}
LARS = {**SGD, "trust_coeff": 0.001, "eps": 1e-8, "trust_clip": False, "always_adapt": False}
RMSPROP = {"lr": 1e-3, "alpha": 0.9, "eps": 1e-3, "momentum": 0.9, "centered": False}
MOMENTS = ("exp_avg", "exp_avg_sq")
NUMBERS = {"step": 3, "m_schedule": 0.9, "trust_ratio": torch.tensor(0.5)}
NUMBERS["adam_norm"] = torch.tensor(2.0)

OTHERS = {
    "FusedLAMB of Apex": (MOMENTS, {**LAMB, "step": 3}),
    "LAMB of timm": (MOMENTS, {**LAMB, "trust_clip": False, "always_adapt": False, "step": 3}),
    "FusedLamb of DeepSpeed": (
        (*MOMENTS, "step"),
        {**ADAM, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01},
    ),
    "AdamP": ((*MOMENTS, "step"), {**ADAM, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False}),
    "AdamW of transformers with correct_bias=False": (
        (*MOMENTS, "step"),
        {**ADAM, "correct_bias": False},
    ),
    "NAdamW of timm": (
        (*MOMENTS, "step"),
        {**ADAM, "caution": False, "foreach": None, "maximize": False, "capturable": False},
    ),
    "ADOPT of timm": ((*MOMENTS, "step"), {**ADAM, "clip_exp": 0.333, "decoupled": False}),
    "LAMB of pytorch-lamb": ((*MOMENTS, "step", "trust_ratio", "adam_norm"), ADAM),
    "AdaBound": ((*MOMENTS, "step"), {**ADAM, "final_lr": 0.1, "gamma": 1e-3, "amsbound": False}),
    "Nadam of timm": ((*MOMENTS, "step", "m_schedule"), {**ADAM, "schedule_decay": 4e-3}),
    "RAdam of timm": ((*MOMENTS, "step"), {**ADAM, "buffer": [[None] * 3 for _ in range(10)]}),
    "FusedNovoGrad of Apex": (
        ("exp_avg",),
        {**ADAM, "bias_correction": True, "grad_averaging": True, "norm_type": 2},
    ),
    "Tiger": (("exp_avg", "step"), {"lr": 1e-3, "beta": 0.965, "weight_decay": 0.01}),
    "SGDScheduleFree": (("z",), {**FREE, "momentum": 0.9}),
    "RAdamScheduleFree": (
        ("z", "exp_avg_sq"),
        {**FREE, "betas": (0.9, 0.999), "eps": 1e-8, "silent_sgd_phase": True},
    ),
    "LARS of timm": (("momentum_buffer",), {**LARS, "trust_clip": True}),
    "RMSpropTF of timm": (
        ("square_avg", "momentum_buffer", "step"),
        {**RMSPROP, "decoupled_decay": False, "lr_in_momentum": True, "weight_decay": 0.1},
    ),
}


def saved(states, group):
    made = {}
    for i in range(2):
        generator = torch.Generator().manual_seed(i)
        made[i] = {key: torch.rand(SHAPE, generator=generator) for key in states}
        made[i] |= {key: value for key, value in NUMBERS.items() if key in states}
    return {"state": made, "param_groups": [{**group, "params": [0, 1]}]}


def seen(tmp_path, content):
    torch.save(content, tmp_path / "seen.pt")
    return json.loads(run("inspect", tmp_path / "seen.pt", "--json").stdout)["algorithm"]


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_another_rule_is_named_and_refused(tmp_path, name):
    content = saved(*OTHERS[name])
    assert seen(tmp_path, content) == name
    for to in ("lowbit", "bitsandbytes"):
        error = convert(tmp_path, content, to, code=3)
        assert f"its optimizer is {name}" in error and f"{to} has no" in error
    # Into another container, and as it is under torch.
    run("convert", tmp_path / "in.pt", tmp_path / "dcp", "--container", "dcp")
    if "step" in OTHERS[name][1]:  # Apex counts the steps of a group: its files are not torch's
        assert f"its optimizer is {name}" in convert(tmp_path, content, "torch", code=3)
        return
    kept = convert(tmp_path, content, "torch")
    group = kept["param_groups"][0]
    assert {key: group[key] for key in OTHERS[name][1]} == OTHERS[name][1]


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_another_rule_is_not_loaded(tmp_path, name):
    torch.save(saved(*OTHERS[name]), tmp_path / "o.pt")
    opt = lowbit.AdamW([(name, torch.nn.Parameter(torch.zeros(SHAPE))) for name in "ab"])
    said = f"its optimizer is {name}, whose states are named like another's; lowbit has no"
    with pytest.raises(ValueError, match=re.escape(said)):
        lowbit.load_optimizer(opt, tmp_path / "o.pt")
    assert all(float(state["step"]) == 0 for state in opt.state.values())


@pytest.mark.parametrize("to", ["torch", "torchao", "fusedadam", "flashoptim", "lpmm"])
def test_lamb_does_not_become_adam(tmp_path, to):
    error = convert(tmp_path, saved(*OTHERS["FusedLAMB of Apex"]), to, code=3)
    assert "its optimizer is FusedLAMB of Apex" in error


def lamb():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(SHAPE))
    opt = lowbit.LAMB([("w", p)], weight_decay=0.1, state_format="8bit")
    p.grad = torch.randn(SHAPE)
    opt.step()
    return {"model": {"w": p.detach()}, "optim": opt.state_dict()}


def test_lowbit_s_lamb_stays_lamb(tmp_path):
    """Its states have Adam's names, and its groups no option of Adam's."""
    assert seen(tmp_path, lamb()) == "lamb"
    kept = convert(tmp_path, lamb(), "lowbit", "--state-format", "float32")
    assert kept["optim"]["param_groups"][0].keys() == lamb()["optim"]["param_groups"][0].keys()
    opt = lowbit.LAMB([("w", torch.nn.Parameter(torch.zeros(SHAPE)))], state_format="float32")
    opt.load_state_dict(kept["optim"])
    assert opt.param_groups[0]["weight_decay"] == 0.1
    for to in ("bitsandbytes", "torchao", "fusedadam", "flashoptim", "lpmm", "adafactor8bit"):
        assert "lamb" in convert(tmp_path, lamb(), to, code=3).split("in.pt", 1)[1].lower()
    loose = convert(tmp_path, lamb(), "torch")["optim"]
    assert "decoupled_weight_decay" not in loose["param_groups"][0]


def test_options_of_a_subspace_stay_in_lowbit(tmp_path):
    p = torch.nn.Parameter(torch.randn(SHAPE))
    opt = lowbit.APOLLO([("w", p)], rank=4, state_format="8bit")
    p.grad = torch.randn(SHAPE)
    opt.step()
    content = {"model": {"w": p.detach()}, "optim": opt.state_dict()}
    kept = convert(tmp_path, content, "lowbit", "--state-format", "float32")
    assert kept["optim"]["param_groups"][0]["rank"] == 4


def test_lars_of_timm_goes_on_in_lowbit(tmp_path):
    """Its step is that of lowbit.LARS where it adapts every tensor and clips nothing."""
    content = saved(("momentum_buffer",), LARS)
    assert seen(tmp_path, content) == "lars"
    kept = convert(tmp_path, content, "lowbit", "--state-format", "float32")
    group = kept["param_groups"][0]
    assert group["trust_coefficient"] == 0.001 and "trust_coeff" not in group
    opt = lowbit.LARS([torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])
    opt.load_state_dict(kept)
    content["param_groups"][0]["weight_decay"] = 0.0  # it scales such a group by nothing
    assert "LARS of timm" in convert(tmp_path, content, "lowbit", code=3)
    content["param_groups"][0]["always_adapt"] = True
    convert(tmp_path, content, "lowbit")
