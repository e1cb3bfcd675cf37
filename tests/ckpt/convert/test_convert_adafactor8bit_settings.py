"""Settings of adafactor-8bit 0.4.6, which makes AdamW and Adafactor of one optimizer: what its
presets.py and the step of its optimizer.py have, into others and back."""

import re

import pytest
import torch

import lowbit
from tests.support.peers.files import adam_file, convert, need_tool, run, same

need_tool()
OFF = ("factored", "relative_step", "scale_parameter", "scale_weight_decay")
GROUP = {
    "lr": 1e-3,
    "beta1": None,
    "beta2": None,
    "beta2_decay": -0.8,
    "beta3": None,
    "eps_came": 1e-16,
    "eps": (1e-30, 1e-3),
    "weight_decay": 0.1,
    "d": 1.0,
    "maximize": False,
    "factored": True,
    "relative_step": True,
    "scale_parameter": True,
    "scale_weight_decay": True,
    "quantize": False,
    "block_size": 2048,
    "min_8bit_size": 4096,
    "momentum_only_1d": None,
    "bias_correction": None,
}
ADAMW = {
    **GROUP,
    **dict.fromkeys(OFF, False),
    "beta1": 0.8,
    "beta2": 0.98,
    "beta2_decay": None,
    "eps": (1e-6, 1e-2),
    "d": 0.0,
}
MEAN = {"beta1": 0.9}
FIXED = {"beta2": 0.99, "beta2_decay": None}
STEPS = {"relative_step": False}


def saved(*moments, **group):
    """A vector; as 0.4.6 keeps it without codes."""
    state = {"step": 3, "is_quantized": False} | {key: torch.full((8,), 0.5) for key in moments}
    return {"state": {0: state}, "param_groups": [{**GROUP, **group, "params": [0]}]}


def test_its_adamw_becomes_adamw(tmp_path):
    """Its betas have names of their own, and its second eps is Adafactor's."""
    file = saved("m", "variance", **ADAMW)
    for to in ("lowbit", "torch", "bitsandbytes"):
        group = convert(tmp_path, file, to)["param_groups"][0]
        assert (group["betas"], group["eps"]) == ((0.8, 0.98), 1e-6), to
    same(convert(tmp_path, file, "adafactor8bit")["param_groups"], file["param_groups"])
    p = torch.nn.Parameter(torch.ones(8))
    opt = lowbit.AdamW([p])
    torch.save(file, tmp_path / "o.pt")
    lowbit.load_optimizer(opt, tmp_path / "o.pt")
    p.grad = torch.ones(8)
    opt.step()
    mean, square = 0.8 * 0.5 + 0.2, 0.98 * 0.5 + 0.02
    update = mean / (1 - 0.8**4) / ((square / (1 - 0.98**4)) ** 0.5 + 1e-6)
    torch.testing.assert_close(p.detach(), torch.full((8,), 1 - 1e-4 - 1e-3 * update))


def test_what_adamw_has_no_option_for_is_named(tmp_path):
    torch.save(saved("m", "variance", **{**ADAMW, "d": 1.0}), tmp_path / "o.pt")
    done = run("convert", tmp_path / "o.pt", tmp_path / "out.pt", "--to", "torch")
    assert "files of torch do not keep d=1.0" in done.stderr


def test_a_fixed_beta2_takes_the_place_of_its_decay(tmp_path):
    file = saved("variance", **FIXED)
    torch.save(file, tmp_path / "o.pt")
    done = run("convert", tmp_path / "o.pt", tmp_path / "out.pt", "--to", "lowbit")
    assert done.stderr == ""
    opt = lowbit.Adafactor([torch.nn.Parameter(torch.ones(8))], beta2_decay=-0.7)
    opt.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert (opt.param_groups[0]["beta2"], opt.param_groups[0]["beta2_decay"]) == (0.99, -0.8)
    same(convert(tmp_path, file, "adafactor8bit")["param_groups"], file["param_groups"])
    lowbit.load_optimizer(opt, tmp_path / "o.pt")
    assert opt.param_groups[0]["beta2"] == 0.99


def test_the_factor_of_weight_decay_stays_without_a_warning(tmp_path):
    torch.save(saved("variance"), tmp_path / "o.pt")
    run("convert", tmp_path / "o.pt", tmp_path / "ours.pt", "--to", "lowbit")
    back = tmp_path / "back.pt"
    done = run("convert", tmp_path / "ours.pt", back, "--to", "adafactor8bit")
    assert done.stderr == ""
    assert torch.load(back, weights_only=True)["param_groups"][0]["scale_weight_decay"] is True


REFUSED = {
    "of normalized gradients": MEAN,
    "bias_correction is None, so its means are not corrected": {**MEAN, **FIXED, **STEPS},
    "bias_correction is True, so its means are corrected": {
        **MEAN,
        **STEPS,
        "bias_correction": True,
    },
    "its weight decay is corrected": {**MEAN, **FIXED, **STEPS, "bias_correction": True},
    "bias_correction is False": {**ADAMW, "bias_correction": False},
}


@pytest.mark.parametrize("why", REFUSED)
def test_steps_that_no_other_takes_are_refused(tmp_path, why):
    file = saved("m", "variance", **REFUSED[why])
    assert why in convert(tmp_path, file, "lowbit", code=3)
    same(convert(tmp_path, file, "adafactor8bit")["param_groups"], file["param_groups"])
    rule = lowbit.AdamW if "betas" in why or REFUSED[why].get("d") == 0 else lowbit.Adafactor
    with pytest.raises(ValueError, match=re.escape(why)):
        lowbit.load_optimizer(rule([torch.nn.Parameter(torch.ones(8))]), tmp_path / "in.pt")


def test_momentum_of_gradients_is_taken(tmp_path):
    file = saved("m", "variance", **MEAN, momentum_only_1d=False)
    assert convert(tmp_path, file, "lowbit")["param_groups"][0]["beta1"] == 0.9


def test_groups_of_others_have_what_it_reads(tmp_path):
    """It takes beta1 and beta2, a pair eps, and these from each group."""
    moments = torch.ones(8), torch.ones(8)
    file = adam_file(*moments, lr=1e-3, betas=(0.8, 0.98), eps=1e-6, weight_decay=0.1)
    group = convert(tmp_path, file, "adafactor8bit")["param_groups"][0]
    wanted = {key: ADAMW[key] for key in (*OFF, "beta1", "beta2", "beta2_decay", "beta3", "d")}
    assert {key: group[key] for key in wanted} == wanted
    assert group["eps"] == (1e-6, 1e-3) and "betas" not in group
    p = torch.nn.Parameter(torch.ones(8))
    opt = torch.optim.Adafactor([p], weight_decay=0.1)
    p.grad = torch.ones(8)
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "o.pt")
    out = tmp_path / "there.pt"
    done = run("convert", tmp_path / "o.pt", out, "--to", "adafactor8bit")
    assert "decays weights by the relative step" in done.stderr
    group = torch.load(out, weights_only=True)["param_groups"][0]
    wanted = {key: GROUP[key] for key in ("beta1", "beta2", "beta2_decay", "d", "relative_step")}
    assert {key: group[key] for key in wanted} == wanted
    assert group["scale_parameter"] is True and group["scale_weight_decay"] is False
