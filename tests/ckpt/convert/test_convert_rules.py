"""Optimizers whose states have the names of another's, known by the settings of their groups. The
keys are those of timm 1.0, Apex, DeepSpeed 0.19, schedulefree 1.4, transformers 4 and
pytorch_optimizer 3."""

import json
import re
import sys
import types

import pytest
import torch

import lowbit
from tests.support.configured import OPTIMIZERS, model, train
from tests.support.groups import params_for
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
    "GaLore or APOLLO of their own packages": (
        (*MOMENTS, "step"),
        {**ADAM, "correct_bias": True, "rank": 8, "update_proj_gap": 200, "proj_type": "std"},
    ),
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


def vectors():
    return torch.nn.LayerNorm(64)


@pytest.mark.parametrize(
    "cls, make",
    [
        *((cls, model) for cls in OPTIMIZERS),
        *((cls, vectors) for cls in OPTIMIZERS if cls is not lowbit.Muon),
    ],
    ids=lambda given: given.__name__,
)
def test_every_optimizer_of_lowbit_is_known(tmp_path, cls, make):
    """A new one too: the tool would take its files for those of another library's optimizer."""
    net = make()
    opt = cls(params_for(cls, net))
    train(net, opt)
    if hasattr(opt, "eval"):
        opt.eval()
    saved = opt.state_dict()
    torch.save(saved, tmp_path / "saved.pt")
    said = json.loads(run("inspect", tmp_path / "saved.pt", "--json").stdout)
    assert said["dialect"] == "lowbit"
    assert said["algorithm"], "add it to algorithm_by_states of tools/dialect/tree/algorithm.cpp"
    opt.load_state_dict(convert(tmp_path, saved, "lowbit", "--state-format", "float32"))


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


def test_lars_is_no_sgd(tmp_path):
    """Its states have the names of SGD's, and its step a length of its own."""
    content = saved(("momentum_buffer",), {**LARS, "always_adapt": True})
    for to in ("bitsandbytes", "flashoptim", "lpmm", "adafactor8bit", "fusedadam"):
        assert "the step of LARS" in convert(tmp_path, content, to, code=3)


@pytest.mark.parametrize("to", ["lpmm", "adafactor8bit", "fusedadam"])
def test_lion_goes_where_there_is_one(tmp_path, to):
    p = torch.nn.Parameter(torch.ones(SHAPE))
    opt = lowbit.Lion([("w", p)], state_format="float32")
    p.grad = torch.ones(SHAPE)
    opt.step()
    assert "no optimizer that keeps these states" in convert(tmp_path, opt.state_dict(), to, code=3)
    convert(tmp_path, opt.state_dict(), "flashoptim", "--state-format", "float32")


def of_bitsandbytes(betas, **norm):
    """One parameter's float32 state, as its SGD and LARS keep it."""
    state = {"step": 2, "state1": torch.ones(8, 8), **norm}
    group = {"lr": 0.1, "betas": betas, "eps": 0, "weight_decay": 0, "params": [0]}
    return {"state": {0: state}, "param_groups": [group]}


def test_lars_of_bitsandbytes_is_read_as_sgd(tmp_path):
    """It limits an SGD's update: no trust coefficient is made up."""
    torch.save(of_bitsandbytes((0.9, 0), unorm_vec=torch.ones(1)), tmp_path / "lars.pt")
    done = run("convert", tmp_path / "lars.pt", tmp_path / "out.pt", "--to", "lowbit")
    assert "bitsandbytes' LARS has SGD's state" in done.stdout + done.stderr
    group = torch.load(tmp_path / "out.pt")["param_groups"][0]
    assert group["momentum"] == 0.9 and "trust_coefficient" not in group


def test_a_dampening_does_not_make_lion_of_sgd(tmp_path):
    p = torch.nn.Parameter(torch.ones(SHAPE))
    opt = torch.optim.SGD([p], momentum=0.9, dampening=0.3)
    p.grad = torch.ones(SHAPE)
    opt.step()
    there = convert(tmp_path, opt.state_dict(), "bitsandbytes")
    assert there["param_groups"][0]["betas"] == (0.9, 0)
    done = run("convert", tmp_path / "in.pt", tmp_path / "warned.pt", "--to", "bitsandbytes")
    assert "dampening=0.3" in done.stderr
    assert seen(tmp_path, there) == "sgd"
    assert "momentum_buffer" in convert(tmp_path, there, "torch")["state"][0]


def one_step(name, **options):
    p = torch.nn.Parameter(torch.ones(64, 128))
    opt = getattr(lowbit, name)([("w", p)], state_format="float32", **options)
    p.grad = torch.ones(64, 128)
    opt.step()
    return opt.state_dict()


def after_a_step(make, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(SHAPE))
    opt = make([p], **options)
    p.grad = torch.randn(SHAPE)
    opt.step()
    return opt.state_dict()


UNFACTORED = {
    "RMSprop": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"cautious": True},
    "AdEMAMix": {},
    "LAMB": {},
    "Adafactor": {"beta1": 0.9, "factored": False},
}


@pytest.mark.parametrize("preset", ["factored8", "factored4"])
@pytest.mark.parametrize("name", UNFACTORED)
def test_moments_that_no_rule_factors_are_not_made_means(tmp_path, name, preset):
    """lowbit's optimizer would refuse the file, and single values would be gone."""
    content = one_step(name, **UNFACTORED[name])
    error = convert(tmp_path, content, "lowbit", "--state-format", preset, code=2)
    assert "as means of rows and columns; take another --state-format" in error


def test_means_go_to_no_rmsprop_of_torch(tmp_path):
    """As older versions of this program wrote them."""
    content = one_step("RMSprop")
    whole = content["state"][0].pop("square_avg")
    content["state"][0] |= {"square_avg_row": whole.mean(-1), "square_avg_col": whole.mean(-2)}
    error = convert(tmp_path, content, "torch", code=3)
    assert "from which torch's square_avg cannot be made" in error


ADAFACTOR = {"beta1": 0.9, "relative_step": False}
HALVES = {
    "Adam": (torch.optim.AdamW, {}, "exp_avg_sq", "Adam without exp_avg_sq"),
    "8 bits": (lowbit.AdamW, {"min_numel": 1}, "exp_avg_sq*", "Adam without exp_avg_sq"),
    "APOLLO": (lowbit.APOLLO, {"rank": None}, "exp_avg_sq*", "Adam without exp_avg_sq"),
    "AdEMAMix": (lowbit.AdEMAMix, {}, "exp_avg_slow*", "AdEMAMix without exp_avg_slow"),
    "Adafactor": (lowbit.Adafactor, ADAFACTOR, "variance*", "Adafactor without second moments"),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}, "square_avg", "RMSprop without square_avg"),
}


@pytest.mark.parametrize("name", HALVES)
def test_an_optimizer_without_one_of_its_states_is_no_other(tmp_path, name):
    make, options, left_out, said = HALVES[name]
    content = after_a_step(make, **options)
    convert(tmp_path, content, "lowbit")
    error = convert(tmp_path, content, "lowbit", "--exclude", f"*.{left_out}", code=3)
    assert f"its optimizer is {said}" in error


@pytest.mark.parametrize("of_bitsandbytes", [False, True])
def test_a_lion_stays_lion(tmp_path, of_bitsandbytes):
    content = saved(("exp_avg", "step"), {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})
    assert seen(tmp_path, content) == "lion"
    if of_bitsandbytes:
        content = convert(tmp_path, content, "bitsandbytes")
        assert content["param_groups"][0]["eps"] == 0
        assert seen(tmp_path, content) == "lion"
    content = convert(tmp_path, content, "lowbit")
    assert seen(tmp_path, content) == "lion"
    assert seen(tmp_path, convert(tmp_path, content, "torch")) == "lion"
    opt = lowbit.Lion([torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])
    opt.load_state_dict(content)


def test_a_lion_that_counts_no_steps(tmp_path):
    """As that of lion-pytorch, which load_optimizer takes too."""
    content = saved(["exp_avg"], {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})
    for to in ("lowbit", "bitsandbytes"):
        state = convert(tmp_path, content, to)["state"]
        assert [float(state[i]["step"]) for i in range(2)] == [1, 1], to
    opt = lowbit.Lion([torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])
    lowbit.load_optimizer(opt, tmp_path / "in.pt")
    assert all(float(state["step"]) == 1 for state in opt.state.values())


class Projector:  # of galore_torch and apollo_torch, which torch.save pickles by its class
    pass


def test_a_projector_is_not_to_be_left_out(tmp_path, monkeypatch):
    """Without it, what is left is an error too."""
    content = saved(*OTHERS["GaLore or APOLLO of their own packages"])
    content["state"][0]["projector"] = Projector()
    module = types.ModuleType("galore_torch")
    module.Projector = Projector
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    monkeypatch.setattr(Projector, "__module__", "galore_torch")
    error = convert(tmp_path, content, "lowbit", code=3)
    assert "projector: is opaque" in error
    assert "--exclude" not in error
    assert "start a new one from the weights" in error


def test_an_object_in_the_state_is_named(tmp_path):
    content = saved(*OTHERS["GaLore or APOLLO of their own packages"])
    content["state"][0]["projector"] = Projector()
    torch.save(content, tmp_path / "o.pt")
    opt = lowbit.AdamW([torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])
    with pytest.raises(ValueError, match=r"projector: is opaque .*Projector.*cannot continue"):
        lowbit.load_optimizer(opt, tmp_path / "o.pt")
