"""Settings of a group that the target does not have: named in a warning, or refused where the
update would go another way. Which of its two weight decays an Adam has is never made up."""

import pytest
import torch

import lowbit
from tests.support.peers.files import ADAM, convert, need_tool, run, stand_in_for_yacs

need_tool()
stand_in_for_yacs()
ADAM_TARGETS = ["torchao", "bitsandbytes", "lpmm", "flashoptim", "fusedadam", "adafactor8bit"]
LACKS = "do not keep"
ASSUMED = "the file does not say whether weight decay was decoupled"


def stepped(make, shape=(64, 128)):
    """The checkpoint of a weight after one step of an optimizer."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    opt = make([("w", p)])
    p.grad = torch.randn(shape)
    opt.step()
    return {"model": {"w": p.detach()}, "optim": opt.state_dict()}


def warnings_of(tmp_path, content, to, *options):
    torch.save(content, tmp_path / "in.pt")
    target = tmp_path / "out.pt"
    return run("convert", tmp_path / "in.pt", target, "--to", to, "--force", *options).stderr


def group_of(tmp_path):
    return torch.load(tmp_path / "out.pt", weights_only=False)["optim"]["param_groups"][0]


def old_adam(**settings):
    """As torch before 2.7 wrote Adam and AdamW: which of the two it was is not in the file."""
    content = stepped(lambda ps: torch.optim.AdamW(ps, weight_decay=0.1))
    del content["optim"]["param_groups"][0]["decoupled_weight_decay"]
    content["optim"]["param_groups"][0].update(settings)
    return content


def test_a_decay_that_is_not_said_stays_unsaid_in_torch(tmp_path):
    """Both of torch's classes load it as their own."""
    assert ASSUMED not in warnings_of(tmp_path, old_adam(), "torch")
    assert "decoupled_weight_decay" not in group_of(tmp_path)
    for make, decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        opt = make([("w", torch.nn.Parameter(torch.zeros(64, 128)))])
        opt.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=False)["optim"])
        assert opt.param_groups[0]["decoupled_weight_decay"] is decoupled


@pytest.mark.parametrize("to", ["lowbit", "bitsandbytes", "lpmm", "adafactor8bit"])
def test_a_decay_that_is_not_said_is_warned_of(tmp_path, to):
    said = warnings_of(tmp_path, old_adam(), to)
    assert ASSUMED in said and "decoupled_weight_decay=False" in said
    assert ASSUMED not in warnings_of(tmp_path, old_adam(weight_decay=0), to)
    said = warnings_of(tmp_path, old_adam(decoupled_weight_decay=True), to)
    assert ASSUMED not in said and "part of the gradient" not in said


@pytest.mark.parametrize("to", ["torchao", "flashoptim", "fusedadam"])
def test_files_that_do_not_say_the_decay_either_assume_none(tmp_path, to):
    assert ASSUMED not in warnings_of(tmp_path, old_adam(), to)


def test_a_decay_of_fused_adam_is_not_made_up(tmp_path):
    """Its adam_w_mode is not in the file, as torchao's and FlashOptim's class is not."""
    for to in ("fusedadam", "torchao", "flashoptim"):
        made = convert(tmp_path, old_adam(), to, name=f"{to}.pt")
        assert ASSUMED in warnings_of(tmp_path, made, "lowbit")
        warnings_of(tmp_path, made, "torch")
        assert "decoupled_weight_decay" not in group_of(tmp_path)


def test_libraries_that_have_one_decay_are_known(tmp_path):
    for to in ("bitsandbytes", "lpmm", "adafactor8bit"):
        made = convert(tmp_path, old_adam(), to, name=f"{to}.pt")
        assert ASSUMED not in warnings_of(tmp_path, made, "lowbit")
        warnings_of(tmp_path, made, "torch")
        assert group_of(tmp_path)["decoupled_weight_decay"] is True
    old = old_adam(correct_bias=True)  # AdamW of transformers
    assert ASSUMED not in warnings_of(tmp_path, old, "lowbit")


@pytest.mark.parametrize("to", ADAM_TARGETS)
def test_a_decay_of_the_gradient_is_warned_of(tmp_path, to):
    content = stepped(lambda ps: torch.optim.Adam(ps, weight_decay=0.1))
    assert "part of the gradient here" in warnings_of(tmp_path, content, to)


@pytest.mark.parametrize("to", ["torch", "muon", "moonlight", "dion"])
def test_muon_that_maximizes_is_refused(tmp_path, to):
    """torch's has no such option: the sign of every update would differ."""
    content = stepped(lambda ps: lowbit.Muon(ps, maximize=True))
    assert "maximize=True" in convert(tmp_path, content, to, code=3)


OWN = {
    "SGD": (
        {"decoupled": True, "dampen_first": True, "cautious": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1},
        ["torch", "bitsandbytes", "flashoptim"],
    ),
    "AdamW": ({"cautious": True}, {}, ["torch", *ADAM_TARGETS]),
    "Muon": (
        {"cautious_weight_decay": True, "ns_coefficients": (2.0, -1.5, 0.5), "split": 2},
        {},
        ["muon", "moonlight", "dion"],
    ),
    "Adafactor": (
        {"relative_step": False, "scale_parameter": False, "add_eps": True, "beta2": 0.99},
        {"decay_by": "alpha"},
        ["torch"],
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_settings_that_the_target_lacks_are_named(tmp_path, name):
    """With their values, once; what has its effect there, or none at all, is not named."""
    lacking, kept, targets = OWN[name]
    lacking = {key: value for key, value in lacking.items() if key != "weight_decay"}
    content = stepped(lambda ps: getattr(lowbit, name)(ps, **OWN[name][0], **kept))
    neutral = stepped(lambda ps: getattr(lowbit, name)(ps))
    for to in targets:
        said = warnings_of(tmp_path, content, to)
        for key in lacking:
            assert said.count(f"{key}=") == 1, (to, key, said)
        assert f"files of {to} do not keep" in said and "lr=" not in said and "foreach" not in said
        assert LACKS not in warnings_of(tmp_path, neutral, to)
    assert LACKS not in warnings_of(tmp_path, content, "lowbit")


def test_settings_of_torch_that_bitsandbytes_lacks_are_named(tmp_path):
    def adagrad(ps, **own):
        return torch.optim.Adagrad(ps, initial_accumulator_value=0.1, **own)

    said = warnings_of(tmp_path, stepped(lambda ps: adagrad(ps, lr_decay=0.5)), "bitsandbytes")
    assert "lr_decay=0.5" in said and "initial_accumulator" not in said
    assert LACKS not in warnings_of(tmp_path, stepped(adagrad), "bitsandbytes")
    assert LACKS not in warnings_of(tmp_path, stepped(adagrad), "lowbit")
    content = stepped(lambda ps: torch.optim.SGD(ps, momentum=0.9, nesterov=True))
    assert "nesterov=True" in warnings_of(tmp_path, content, "bitsandbytes")
    assert LACKS not in warnings_of(tmp_path, content, "lowbit")


def test_a_split_that_torch_lacks_is_named(tmp_path):
    """torch's Muon makes a matrix of several orthogonal as one."""
    content = stepped(lambda ps: lowbit.Muon(ps, split=2))
    assert "split=2" in warnings_of(tmp_path, content, "torch")


def test_caution_of_timm_is_named(tmp_path):
    """timm's AdamW has it beside amsgrad."""
    content = {"state": stepped(torch.optim.AdamW)["optim"]["state"]}
    group = {**ADAM, "amsgrad": False, "caution": True, "corrected_weight_decay": False}
    content["param_groups"] = [{**group, "params": [0]}]
    said = warnings_of(tmp_path, content, "lowbit")
    assert "caution=True" in said and "corrected_weight_decay" not in said


def test_adafactor_has_its_options_under_the_names_of_adafactor_8bit(tmp_path):
    options = {"relative_step": False, "scale_parameter": False, "beta2": 0.99}
    content = stepped(lambda ps: lowbit.Adafactor(ps, decay_by="alpha", **options))
    assert LACKS not in warnings_of(tmp_path, content, "adafactor8bit")
    group = group_of(tmp_path)
    assert group["scale_weight_decay"] is True
    assert {key: group[key] for key in options} == options
    assert not group.keys() & {"decay_by", "add_eps", "projection", "fira_margin", "rank"}
    warnings_of(tmp_path, torch.load(tmp_path / "out.pt", weights_only=False), "lowbit")
    assert group_of(tmp_path)["decay_by"] == "alpha"
    content = stepped(lambda ps: lowbit.Adafactor(ps, decay_by="rho", add_eps=True))
    assert "add_eps=True" in warnings_of(tmp_path, content, "adafactor8bit")
    assert group_of(tmp_path)["scale_weight_decay"] is False


def test_a_limiter_of_adafactor_keeps_its_norm(tmp_path):
    content = stepped(lambda ps: lowbit.Adafactor(ps, fira_margin=0.1))
    norm = content["optim"]["state"][0]["update_norm"]
    assert float(norm) > 0
    there = convert(tmp_path, content, "adafactor8bit")["optim"]
    assert there["param_groups"][0]["enable_fira_for_adafactor"] is True
    assert torch.equal(there["state"][0]["fira_prev_norm"], norm)
    content = stepped(lowbit.Adafactor)
    there = convert(tmp_path, content, "adafactor8bit")["optim"]
    assert "fira_prev_norm" not in there["state"][0]
